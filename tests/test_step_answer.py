"""What compute says is of the step that runs, or compute went wrong."""

import dataclasses

import pytest
from simulation import done, need

from coordinator.core.step_answer import fault_of
from shm.messages import Need, Sampled, Slice, Step, StepDone

STEP = Step(7, (Slice(1, 0, 1, True), Slice(2, 0, 3, False), Slice(3, 5, 1, True)), 0, 4)


def drawn(*requests: int) -> StepDone:
    return done(7, sampled=tuple(Sampled(request, 5, 0.0) for request in requests))


@pytest.mark.parametrize(
    ("said", "running", "fault"),
    [
        (need(0, [1])._replace(step=7), STEP, None),
        (need(0, [1])._replace(step=8), STEP, "sent Need of step 8, which does not run"),
        (need(0, [1])._replace(step=7), None, "sent Need of step 7, which does not run"),
        (drawn(1, 3), STEP, None),
        (drawn(3, 1), STEP, None),
        (dataclasses.replace(drawn(), cancelled=True, failure="EIO"), STEP, None),
        (dataclasses.replace(drawn(), cancelled=True), STEP, "stopped in step 7, which nobody"),
        (drawn(), STEP, "sampled nothing for request 1, which waits for a token"),
        (drawn(1), STEP, "sampled nothing for request 3, which waits for a token"),
        (done(7), None, "sent StepDone of step 7, which does not run"),
        (done(8), STEP, "sent StepDone of step 8, which does not run"),
        (drawn(1, 1), STEP, "sampled for request 1, which wants no more tokens of the step"),
        (drawn(1, 2), STEP, "sampled for request 2, which wants no more tokens of the step"),
        (drawn(4), STEP, "sampled for request 4, which wants no more tokens of the step"),
    ],
)
def test_what_compute_says_is_of_the_step_that_runs(
    said: Need | StepDone, running: Step | None, fault: str | None
) -> None:
    found = fault_of(said, running, may_stop=False)
    assert found == fault or (found is not None and fault is not None and found.startswith(fault))


def test_who_was_told_to_stop_may() -> None:
    stopped = dataclasses.replace(drawn(), cancelled=True)
    assert fault_of(stopped, STEP, may_stop=True) is None
    assert fault_of(stopped, None, may_stop=True) is not None
