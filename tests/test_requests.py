"""Composition of steps: scripts of events, and random runs."""

import random

import pytest
from simulation import done, engine

from coordinator.core.actions import Ended, ToCompute
from coordinator.core.schedule import Schedule
from coordinator.core.state import ComputeDied, Continue, EndRequest, FromCompute, NewRequest
from shm.messages import Cancel, Finished, Sampled, Sampling, Slice, Step, StepDone, Submit

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 1)


def submit(request: int, n_prompt: int, n_context: int = 1000) -> Submit:
    return Submit(request, tuple(range(n_prompt)), GREEDY, n_context, False)


def machine(
    max_running: int = 4, chunk: int = 64, n_layers: int = 8, n_kv_blocks: int | None = None
):
    schedule = Schedule(n_layers, chunk, max_running, n_kv_blocks)
    return engine(n_layers, 4, 4, schedule=schedule)


def steps(run) -> list[Step]:
    """Steps sent to compute since the last call."""
    found = [message for message in run.inbox if isinstance(message, Step)]
    run.inbox.clear()
    return found


def start(run, request: int, n_prompt: int, max_tokens: int = 3, **options) -> None:
    stop_ids = frozenset({9})
    run.handle(NewRequest(submit(request, n_prompt, **options), max_tokens, stop_ids))


def go_on(run, sampled=()) -> list[Step]:
    run.inbox.clear()
    run.handle(FromCompute(done(run.core.requests.running_step.step, (), tuple(sampled))))
    run.handle(Continue())
    return steps(run)


def test_one_request_from_prompt_to_length() -> None:
    run = machine()
    start(run, 7, 100)
    run.handle(Continue())
    assert steps(run) == [Step(1, (Slice(7, 0, 64, False),), 0, 8)]
    assert go_on(run) == [Step(2, (Slice(7, 64, 36, True),), 0, 8)]
    assert go_on(run, [Sampled(7, 5, -0.1)]) == [Step(3, (Slice(7, 100, 1, True),), 0, 8)]
    assert go_on(run, [Sampled(7, 6, -0.1)]) == [Step(4, (Slice(7, 101, 1, True),), 0, 8)]
    assert go_on(run, [Sampled(7, 6, -0.1)]) == []
    assert run.ended == [Ended(7, "length", None)]
    assert run.core.requests.is_idle


def test_a_stop_id_ends_with_eos() -> None:
    run = machine()
    start(run, 1, 3)
    run.handle(Continue())
    assert go_on(run, [Sampled(1, 9, -0.1)]) == []
    assert run.ended == [Ended(1, "eos", None)]


def test_a_full_context_ends_with_length() -> None:
    run = machine()
    start(run, 1, 3, max_tokens=50, n_context=4)
    run.handle(Continue())
    assert go_on(run, [Sampled(1, 5, -0.1)]) == []
    assert run.ended == [Ended(1, "length", None)]


def test_eval_wants_no_token() -> None:
    run = machine()
    start(run, 1, 3, max_tokens=0)
    run.handle(Continue())
    assert steps(run) == [Step(1, (Slice(1, 0, 3, False),), 0, 8)]
    assert go_on(run) == []
    assert run.ended == [Ended(1, "length", None)]


def test_a_newcomers_prompt_is_cut_so_that_others_decode() -> None:
    run = machine()
    start(run, 1, 3, max_tokens=50)
    run.handle(Continue())
    start(run, 2, 70)
    order = []
    step = steps(run)[0]
    for _ in range(6):
        drawn = [Sampled(part.request, 5, -0.1) for part in step.slices if part.sample]
        (step,) = go_on(run, drawn)
        order.append((step.slices[0].request, step.first_layer, step.stop_layer))
    assert order == [(1, 0, 8), (2, 0, 4), (1, 0, 8), (2, 4, 8), (1, 0, 8), (2, 0, 4)]


def test_sequences_decode_together() -> None:
    run = machine()
    for request in (1, 2):
        start(run, request, 3, max_tokens=50)
    run.handle(Continue())
    (step,) = steps(run)
    seen = []
    for _ in range(3):
        seen.append([(part.request, part.start, part.sample) for part in step.slices])
        (step,) = go_on(run, [Sampled(p.request, 5, -0.1) for p in step.slices if p.sample])
    assert seen == [
        [(1, 0, False), (2, 0, False)], [(1, 0, True), (2, 0, True)], [(1, 3, True), (2, 3, True)],
    ]  # fmt: skip


def test_what_a_chunk_has_room_for_goes_to_the_next_prompts() -> None:
    run = machine(chunk=128)
    for request, n_prompt in ((1, 150), (2, 60), (3, 70)):
        start(run, request, n_prompt)
    run.handle(Continue())
    chunks = []
    (step,) = steps(run)
    while any(part.n_tokens > 1 for part in step.slices):
        if step.first_layer == 0:
            chunks.append([(part.request, part.start, part.n_tokens) for part in step.slices])
        (step,) = go_on(run, [Sampled(p.request, 5, -0.1) for p in step.slices if p.sample])
        while all(part.n_tokens == 1 for part in step.slices) and len(chunks) < 3:
            drawn = [Sampled(p.request, 5, -0.1) for p in step.slices]
            (step,) = go_on(run, drawn)
    assert chunks == [[(1, 0, 128)], [(1, 128, 22), (2, 0, 60), (3, 0, 46)], [(3, 46, 24)]]


def test_one_that_leaves_a_chunk_leaves_the_others_where_they_are() -> None:
    run = machine()
    for request in (1, 2, 3):
        start(run, request, 10, max_tokens=1)
    run.handle(Continue())
    (step,) = steps(run)
    assert (step.first_layer, step.stop_layer) == (0, 4)
    assert run.handle(EndRequest(2, "cancelled")) == []  # not in the middle of their step
    (step,) = go_on(run)
    assert [part.request for part in step.slices] == [1, 3]
    assert (step.first_layer, step.stop_layer) == (4, 8)
    assert [ended.request for ended in run.ended] == [2]


def test_the_queue_waits_for_room() -> None:
    run = machine(max_running=1)
    start(run, 1, 3, max_tokens=1)
    start(run, 2, 3, max_tokens=1)
    run.handle(Continue())
    assert steps(run)[0].slices[0].request == 1
    assert go_on(run, [Sampled(1, 5, -0.1)])[0].slices[0].request == 2


def test_cancel_queued_running_and_unknown() -> None:
    run = machine(max_running=1)
    start(run, 1, 3)
    start(run, 2, 3)
    run.handle(Continue())
    run.handle(EndRequest(2, "cancelled"))
    assert run.ended == [Ended(2, "cancelled", None)]
    actions = run.handle(EndRequest(1, "cancelled"))
    assert actions == [ToCompute(Cancel(1))]
    step = run.core.requests.running_step.step
    run.handle(FromCompute(StepDone(step, (), done(1).times, 0, (), True)))
    assert run.ended[-1] == Ended(1, "cancelled", None)
    assert run.handle(EndRequest(77, "cancelled")) == []


def test_a_stop_string_ends_before_the_next_step() -> None:
    run = machine()
    start(run, 1, 3, max_tokens=50)
    run.handle(Continue())
    step = run.core.requests.running_step.step
    run.handle(FromCompute(done(step, (), (Sampled(1, 5, -0.1),))))
    actions = run.handle(EndRequest(1, "stop"))
    assert ToCompute(Finished(1, "stop")) in actions
    assert run.handle(Continue()) == []


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    run = machine(max_running=1)
    start(run, 1, 3)
    start(run, 2, 3)
    run.handle(Continue())
    run.core.requests.fail_step("layer 1, expert 2: EIO")
    step = run.core.requests.running_step.step
    run.handle(FromCompute(StepDone(step, (), done(1).times, 0, (), True)))
    assert run.ended == [Ended(1, "error", "layer 1, expert 2: EIO")]
    run.handle(Continue())
    assert steps(run)[-1].slices[0].request == 2


def test_a_step_that_compute_could_not_do_ends_its_requests_and_no_others() -> None:
    run = machine(max_running=1)
    start(run, 1, 3)
    start(run, 2, 3)
    run.handle(Continue())
    step = run.core.requests.running_step.step
    why = "token_embd.weight: Input/output error"
    failed = StepDone(step, (), done(1).times, 0, (), True, (), why)
    assert ToCompute(Finished(1, "error")) in run.handle(FromCompute(failed))
    assert run.ended == [Ended(1, "error", why)]
    run.handle(Continue())
    assert steps(run)[-1].slices[0].request == 2


def test_a_dead_compute_ends_what_it_held_and_keeps_the_queue() -> None:
    run = machine(max_running=1)
    start(run, 1, 3)
    start(run, 2, 3)
    run.handle(Continue())
    steps(run)
    run.handle(ComputeDied("compute was killed"))
    assert run.ended == [Ended(1, "error", "compute was killed")]
    run.handle(Continue())
    assert steps(run)[0].slices[0].request == 2


def test_a_request_waits_until_all_blocks_that_it_may_need_are_free() -> None:
    run = machine(n_kv_blocks=5)
    start(run, 1, 100, max_tokens=29)  # 128 tokens are stored: two blocks
    start(run, 2, 129, max_tokens=1)  # three blocks
    start(run, 3, 1, max_tokens=1)
    run.handle(Continue())
    assert begun(run) == [1, 2]
    run.handle(FromCompute(done(1, (), ())))
    run.handle(EndRequest(1, "cancelled"))
    run.handle(Continue())
    assert begun(run) == [1, 2, 3]


def test_waiting_is_in_order() -> None:
    run = machine(n_kv_blocks=5)
    for request, n_prompt in ((1, 250), (2, 200), (3, 1)):
        start(run, request, n_prompt)
    run.handle(Continue())
    assert begun(run) == [1], "the small one may not overtake for ever"


def test_the_context_bounds_what_is_reserved() -> None:
    run = machine(n_kv_blocks=2)
    start(run, 1, 100, max_tokens=10_000, n_context=128)
    run.handle(Continue())
    assert begun(run) == [1]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    run = machine(n_kv_blocks=2)
    start(run, 1, 100, max_tokens=100)
    (ended,) = run.ended
    assert ended.reason == "error"
    assert ended.error is not None
    assert ended.error.startswith("KV cache: expected at most 128 tokens of prompt and answer, ")
    assert run.core.requests.is_idle


def begun(run) -> list[int]:
    """Requests that compute was told of, since the start."""
    return [message.request for message in run.inbox if isinstance(message, Submit)]


@pytest.mark.parametrize("n_kv_blocks", [None, 4, 7])
def test_random_requests_all_end_once(n_kv_blocks: int | None) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        run = machine(max_running=rng.randint(1, 4), n_kv_blocks=n_kv_blocks)
        pending = list(range(12))
        stored: dict[int, int] = {}
        while pending or not run.core.requests.is_idle:
            if pending and rng.random() < 0.3:
                start(run, pending.pop(), rng.randint(1, 200), rng.randint(1, 6))
            if rng.random() < 0.05:
                run.handle(EndRequest(rng.randint(0, 11), rng.choice(["cancelled", "stop"])))
            run.handle(Continue())
            step = run.core.requests.running_step
            if step is None:
                continue
            for part in step.slices:
                stored[part.request] = part.start + part.n_tokens
            living = [-(-n // 64) for r, n in stored.items() if run.core.requests.of(r)]
            assert n_kv_blocks is None or sum(living) <= n_kv_blocks
            if rng.random() < 0.02:
                run.handle(ComputeDied("gone"))
                continue
            drawn = [Sampled(p.request, rng.randint(0, 12), -1.0) for p in step.slices if p.sample]
            run.handle(FromCompute(done(step.step, (), tuple(drawn))))
        assert sorted(ended.request for ended in run.ended) == list(range(12))
