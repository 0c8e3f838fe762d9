"""Whether what compute says of a step fits the step that runs. Part of the decision core.

A compute worker that goes wrong may tell of another step, or draw tokens for sequences that wanted
none. Then it is killed and started again, and the core never hears of it.
"""

from shm.messages import Need, Step, StepDone


def fault_of(said: Need | StepDone, running: Step | None) -> str | None:
    """What is wrong with it, for people; None where it fits."""
    if running is None or said.step != running.step:
        return f"sent {type(said).__name__} of step {said.step}, which does not run"
    return _fault_of_tokens(said, running) if isinstance(said, StepDone) else None


def _fault_of_tokens(done: StepDone, running: Step) -> str | None:
    wanted = {part.request for part in running.slices if part.sample}
    for sampled in done.sampled:
        if sampled.request not in wanted:
            return f"sampled for request {sampled.request}, which wants no more tokens of the step"
        wanted.remove(sampled.request)
    return None
