"""Whether what compute says of a step fits the step that runs. Part of the decision core.

A compute worker that goes wrong may tell of another step, draw tokens for sequences that wanted
none and none for those that did, or stop where nothing is to be stopped: such a step would be
composed again without end. Then it is killed and started again, and the core never hears of it.
"""

from shm.messages import Need, Step, StepDone


def fault_of(said: Need | StepDone, running: Step | None, *, may_stop: bool) -> str | None:
    """What is wrong with it, for people; None where it fits. `may_stop`: compute was told to end
    the step early, or is about to hear that."""
    if running is None or said.step != running.step:
        return f"sent {type(said).__name__} of step {said.step}, which does not run"
    if isinstance(said, Need):
        return None
    if said.cancelled and said.failure is None and not may_stop:
        return f"stopped in step {said.step}, which nobody told it to"
    return _fault_of_tokens(said, running)


def _fault_of_tokens(done: StepDone, running: Step) -> str | None:
    wanted = {part.request for part in running.slices if part.sample}
    for sampled in done.sampled:
        if sampled.request not in wanted:
            return f"sampled for request {sampled.request}, which wants no more tokens of the step"
        wanted.remove(sampled.request)
    if wanted and not done.cancelled:
        return f"sampled nothing for request {min(wanted)}, which waits for a token of the step"
    return None
