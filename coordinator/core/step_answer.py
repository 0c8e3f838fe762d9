"""Whether a `StepDone` can be the answer to the step that runs. Part of the decision core.

A compute worker that goes wrong may answer another step, or draw tokens for sequences that wanted
none. Then its sender is killed and started again, and the core never hears of it.
"""

from shm.messages import Step, StepDone


def fault_of(done: StepDone, running: Step | None) -> str | None:
    """What is wrong with it, for people; None for an answer."""
    if running is None or done.step != running.step:
        return f"sent StepDone of step {done.step}, which does not run"
    wanted = {part.request for part in running.slices if part.sample}
    for sampled in done.sampled:
        if sampled.request not in wanted:
            return f"sampled for request {sampled.request}, which wants no more tokens of the step"
        wanted.remove(sampled.request)
    return None
