"""Feeding the forward pass: the order of grants never shows, releases are complete, late messages
do no harm, and waits are told apart."""

import dataclasses
import itertools
import random
import resource
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import tiny_model
from model_runner import ModelRunner
from read_cases import opened, pool_of

from compute_worker.feed import ExpertFeed, StepCancelled
from compute_worker.own_memory import OwnMemory
from compute_worker.regions import Regions
from shm.mapped_files import MappedFiles
from shm.messages import (
    Abort,
    Adopt,
    Adopted,
    Cancel,
    Dropped,
    Grant,
    Location,
    Need,
    ReadSpan,
    Release,
    Revoke,
    SlabNotice,
    SlotLease,
)
from shm.pool import PoolMapping

N_EXPERTS, LAYER, N_TOKENS, STEP = 8, 1, 6, 7


class ScriptedLink:
    """Answers each `Need` with what the test's `answer` makes of it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.inbox: deque[Any] = deque()
        self.answer: Callable[[Need], list[Any]] = lambda need: []

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Need):
            self.inbox.extend(self.answer(message))

    def receive(self) -> Any:
        assert self.inbox, "the feed waits for what never comes"
        return self.inbox.popleft()

    def poll(self) -> Any | None:
        return self.inbox.popleft() if self.inbox else None


class Stage:
    """A feed over a tiny model's mapped file, and the same experts computed without it."""

    def __init__(self, runner: ModelRunner, regions: Regions) -> None:
        self.runner = runner
        self.link = ScriptedLink()
        self.clock_ns = itertools.count(step=10)
        self.feed = ExpertFeed(
            self.link, regions, runner.spec.slabs, runner.spec.n_active, runner.kernels,
            OwnMemory(regions, runner.spec.slabs, locks=False),
            now=lambda: next(self.clock_ns),
        )  # fmt: skip
        rng = np.random.default_rng(4)
        self.x = rng.standard_normal((N_TOKENS, runner.spec.width)).astype(np.float32)
        n_active = runner.spec.n_active
        chosen = [rng.choice(N_EXPERTS, n_active, replace=False) for _ in range(N_TOKENS)]
        self.chosen = np.sort(np.array(chosen, np.int32), axis=1)
        self.shares = rng.random((N_TOKENS, n_active)).astype(np.float32)
        self.used = sorted({*self.chosen.ravel().tolist()})
        self.feed.begin_step(STEP, None)

    def location(self, expert: int, layer: int = LAYER) -> Location:
        ranges = self.runner.spec.slabs.layers[layer].ranges(expert)
        gate, up, down = (part.offset for part in ranges)
        return Location(expert, SlotLease(100 + expert, 3), 1, gate, up, down)

    def grant(self, experts: list[int], *, n_waiting: int = 0, standing: bool = False) -> Grant:
        return Grant(LAYER, tuple(map(self.location, experts)), (), n_waiting, standing, STEP)

    def coming(self, there: list[int], on_the_way: list[int]) -> Grant:
        return self.grant(there)._replace(on_the_way=tuple(map(self.location, on_the_way)))

    def notice(self, expert: int, generation: int = 3) -> SlabNotice:
        lease = SlotLease(self.location(expert).lease.slot, generation)
        return SlabNotice(lease, ReadSpan(12, 14))

    def run(self) -> bytes:
        found = self.feed(LAYER, self.x, self.chosen, self.shares)
        return found.tobytes()

    @property
    def expected(self) -> bytes:
        return self.runner.experts(LAYER, self.x, self.chosen, self.shares).tobytes()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    model = tiny_model(tmp_path / "tiny.gguf", n_experts=N_EXPERTS, n_active=3)
    with opened(model) as file:
        runner = ModelRunner(model)
        yield Stage(runner, Regions(None, MappedFiles([file.fd], [file.size_bytes])))
        runner.close()


class PoolStage(Stage):
    """The same with the experts in a pool, slot n for expert n."""

    def __init__(self, runner: ModelRunner, pool: PoolMapping, file_bytes: bytes) -> None:
        super().__init__(runner, Regions(pool, None))
        self.pool = pool
        self.file_bytes = file_bytes
        self.fill()

    def fill(self) -> None:
        for expert, windows in enumerate(self.pool.windows):
            ranges = self.runner.spec.slabs.layers[LAYER].ranges(expert)
            for part, start in zip(ranges, windows, strict=True):
                content = self.file_bytes[part.offset : part.offset + part.n_bytes]
                self.pool.view[start : start + part.n_bytes] = content
            self.pool.write_header(expert, 3, LAYER, expert, 1)

    def wipe(self, experts: list[int]) -> None:
        """Their memory goes back to the system."""
        for expert in experts:
            start = self.pool.windows[expert][0]
            n_bytes = self.pool.layout.classes[0].slot_bytes
            self.pool.view[start : start + n_bytes] = bytes(n_bytes)

    def location(self, expert: int, layer: int = LAYER) -> Location:
        return Location(expert, SlotLease(expert, 3), 0, *self.pool.windows[expert])


@pytest.fixture
def pool_stage(tmp_path: Path) -> Iterator[PoolStage]:
    model = tiny_model(tmp_path / "tiny.gguf", n_experts=N_EXPERTS, n_active=3)
    runner = ModelRunner(model)
    with pool_of(N_EXPERTS, *runner.spec.slabs.layers[LAYER].range_bytes) as (pool, _):
        yield PoolStage(runner, pool, model.read_bytes())
    runner.close()


def released(stage: Stage) -> list[int]:
    """Slots that were given back, by messages and by what the next one will carry."""
    told = [lease for m in stage.link.sent for lease in getattr(m, "released", ())]
    return sorted(lease.slot - 100 for lease in (*told, *stage.feed.take_released()))


@pytest.mark.parametrize("seed", range(12))
def test_the_order_of_grants_does_not_show(stage: Stage, seed: int) -> None:
    rng = random.Random(seed)
    order = rng.sample(stage.used, len(stage.used))
    cuts = sorted(rng.sample(range(len(order) + 1), 3))
    groups = [order[a:b] for a, b in itertools.pairwise([0, *cuts, len(order)])]
    stage.link.answer = lambda need: [stage.grant(group) for group in groups]
    assert stage.run() == stage.expected
    (need,) = stage.link.sent
    assert [use.expert for use in need.experts] == stage.used
    counts = [int((stage.chosen == expert).sum()) for expert in stage.used]
    assert [use.n_tokens for use in need.experts] == counts
    assert (need.step, need.layer, need.released) == (STEP, LAYER, ())
    assert released(stage) == stage.used


def test_a_release_is_sent_at_once_while_somebody_waits(stage: Stage) -> None:
    """Each slot is asked for by the next expert, whose grant comes when it was given back."""
    first, *rest = stage.used
    later = [stage.grant([expert], n_waiting=len(rest) - n) for n, expert in enumerate(rest, 1)]

    def send(message: object) -> None:
        stage.link.sent.append(message)
        if isinstance(message, Need):
            stage.link.inbox.append(stage.grant([first], n_waiting=len(rest)))
        elif isinstance(message, Release):
            stage.link.inbox.append(later.pop(0))

    stage.link.send = send  # type: ignore[method-assign]
    assert stage.run() == stage.expected
    sent = stage.link.sent[1:]
    assert sent == [Release((SlotLease(100 + expert, 3),)) for expert in stage.used[:-1]]
    assert released(stage) == stage.used


def test_what_is_there_together_is_computed_together(stage: Stage) -> None:
    first, *others = stage.used
    calls = []

    def expert_blocks(shape: object, addresses: object, pairs: list[object], *rest: Any) -> None:
        calls.append(len(pairs))
        stage.runner.kernels.expert_blocks(shape, addresses, pairs, *rest)

    stage.feed._kernels = dataclasses.replace(stage.runner.kernels, expert_blocks=expert_blocks)
    answer = [stage.coming([first], others), *map(stage.notice, others)]
    stage.link.answer = lambda need: answer
    assert stage.run() == stage.expected
    assert calls == [len(stage.used)]


def test_releases_ride_in_the_next_need(stage: Stage) -> None:
    stage.link.answer = lambda need: [stage.grant(stage.used)]
    stage.run()
    stage.run()
    assert [lease.slot - 100 for lease in stage.link.sent[1].released] == stage.used


def test_a_standing_grant_needs_no_message_until_it_is_revoked(stage: Stage) -> None:
    everything = list(range(N_EXPERTS))
    stage.link.answer = lambda need: [stage.grant(everything, standing=True)]
    assert stage.run() == stage.expected
    assert stage.run() == stage.expected
    assert len(stage.link.sent) == 1
    assert stage.feed.standing_uses == len(stage.used)
    assert released(stage) == []
    stage.feed.note(Revoke((LAYER,)))
    assert stage.link.sent[1:] == [Dropped((LAYER,))]
    stage.link.answer = lambda need: [stage.grant(stage.used)]
    assert stage.run() == stage.expected
    assert len(stage.link.sent) == 3


def test_a_lone_token_uses_what_stands(stage: Stage) -> None:
    stage.feed.note(stage.grant(list(range(N_EXPERTS)), standing=True))
    stage.x, stage.chosen, stage.shares = stage.x[2:3], stage.chosen[2:3], stage.shares[2:3]
    assert stage.run() == stage.expected
    assert stage.feed.standing_uses == stage.chosen.size and stage.link.sent == []


def test_adopted_experts_are_computed_from_the_copies(pool_stage: PoolStage) -> None:
    stage, everything = pool_stage, list(range(N_EXPERTS))
    stage.feed.note(stage.grant(everything, standing=True))  # between two steps
    for part in (everything[:3], everything[3:]):
        stage.feed.note(Adopt(LAYER, tuple(map(stage.location, part))))
        stage.wipe(part)
        assert stage.run() == stage.expected
    assert stage.link.sent == [Adopted(LAYER, True)] * 2
    stage.feed.note(Revoke((LAYER,)))
    assert stage.link.sent[2:] == [Dropped((LAYER,))]
    stage.fill()
    stage.link.answer = lambda need: [stage.grant(stage.used)]
    assert stage.run() == stage.expected
    assert isinstance(stage.link.sent[3], Need)


def test_without_memory_for_copies_the_pool_is_used_as_before(pool_stage: PoolStage) -> None:
    stage, everything = pool_stage, list(range(N_EXPERTS))
    stage.feed.note(stage.grant(everything, standing=True))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, before[1]))
    try:
        stage.feed.note(Adopt(LAYER, tuple(map(stage.location, everything))))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert stage.link.sent == [Adopted(LAYER, False)]
    assert stage.run() == stage.expected


def test_an_abort_ends_the_step(stage: Stage) -> None:
    stage.link.answer = lambda need: [stage.grant(stage.used[:1]), Abort(STEP)]
    with pytest.raises(StepCancelled):
        stage.run()
    stage.feed.end_step(early=True)
    assert released(stage) == []  # the coordinator has released everything itself
    stage.feed.begin_step(STEP + 1, None)
    again = stage.grant(stage.used)._replace(step=STEP + 1)
    stage.link.answer = lambda need: [again]
    assert stage.run() == stage.expected


def test_an_abort_of_another_step_does_not(stage: Stage) -> None:
    stage.link.answer = lambda need: [Abort(STEP - 1), Cancel(9), stage.grant(stage.used)]
    assert stage.run() == stage.expected


def test_an_abort_that_comes_after_its_step_is_late(stage: Stage) -> None:
    """The step was cancelled while a read of it failed: both are told, one too late."""
    stage.feed.end_step(early=True)
    stage.feed.note(Abort(STEP))
    stage.feed.note(stage.grant(stage.used))  # and so is what was granted meanwhile


def test_cancel_is_remembered_until_the_request_is_over(stage: Stage) -> None:
    stage.feed.note(Cancel(9))
    assert stage.feed.endings.is_cancelled(9)
    assert not stage.feed.endings.is_cancelled(8)
    stage.feed.endings.forget(9)
    stage.feed.endings.forget(8)
    assert not stage.feed.endings.is_cancelled(9)


def test_a_grant_of_a_layer_that_is_over_says_nothing(stage: Stage) -> None:
    """Its slots may be written to by now."""
    other_layer = stage.grant(stage.used)._replace(layer=LAYER + 1)
    other_step = stage.grant(stage.used)._replace(step=STEP - 1)
    stage.link.answer = lambda need: [other_layer, other_step, stage.grant(stage.used)]
    assert stage.run() == stage.expected
    assert len(stage.feed.take_released()) == len(stage.used)


@pytest.mark.parametrize("when", ["before the need", "before the grant", "after the grant"])
def test_what_is_on_its_way_is_computed_from_its_notice_on(stage: Stage, when: str) -> None:
    first, *others = stage.used
    notices = [stage.notice(expert) for expert in others]
    grant = stage.coming([first], others)
    if when == "before the need":
        for notice in notices:
            stage.feed.note(notice)
        notices = []
    answer = [*notices, grant] if when == "before the grant" else [grant, *notices]
    stage.link.answer = lambda need: answer
    assert stage.run() == stage.expected
    assert sorted(lease.slot - 100 for lease in stage.feed.take_released()) == stage.used


def test_an_old_notice_is_not_taken_for_a_new_one(stage: Stage) -> None:
    first, *others = stage.used
    grant = stage.coming([first], others)
    old = [stage.notice(expert, generation=2) for expert in others]
    stage.link.answer = lambda need: [*old, grant, *old]
    with pytest.raises(AssertionError, match="waits for what never comes"):
        stage.run()


def test_what_comes_without_a_notice_is_granted_again(stage: Stage) -> None:
    first, *others = stage.used
    again = stage.grant(others)
    late = [stage.notice(expert) for expert in others]
    stage.link.answer = lambda need: [stage.coming([first], others), again, *late, again]
    assert stage.run() == stage.expected
    assert sorted(lease.slot - 100 for lease in stage.feed.take_released()) == stage.used


def test_recent_tokens_are_counted_for_prompts_only(stage: Stage) -> None:
    recent = np.array([False] * (N_TOKENS - 2) + [True] * 2)
    stage.feed.begin_step(STEP, recent)
    stage.link.answer = lambda need: [stage.grant(stage.used)]
    stage.run()
    (need,) = stage.link.sent
    last = stage.chosen[-2:].ravel().tolist()
    assert [u.n_recent_tokens for u in need.experts] == [last.count(e) for e in stage.used]


def test_the_last_layer_has_only_the_tokens_that_are_wanted(stage: Stage) -> None:
    wanted = np.array([0, N_TOKENS - 1])
    stage.feed.begin_step(STEP, np.arange(N_TOKENS) >= N_TOKENS - 2, wanted)
    used = sorted({*stage.chosen[wanted].ravel().tolist()})
    stage.link.answer = lambda need: [stage.grant(used)]
    found = stage.feed(LAYER, stage.x[wanted], stage.chosen[wanted], stage.shares[wanted])
    (need,) = stage.link.sent
    last = stage.chosen[-1].tolist()
    assert [u.n_recent_tokens for u in need.experts] == [last.count(e) for e in used]
    rows = (stage.x[wanted], stage.chosen[wanted], stage.shares[wanted])
    assert found.tobytes() == stage.runner.experts(LAYER, *rows).tobytes()


@pytest.mark.parametrize(
    ("spans", "disk_ns"),
    [
        ((), 0),
        (((0, 5),), 0),  # over before the wait began
        (((0, 1000),), 10),  # all of it
        (((14, 17),), 3),
        (((12, 15), (14, 17)), 5),  # two at once count once
        (((12, 13), (17, 40)), 4),
    ],
)
def test_waits_are_disk_while_a_read_runs_else_coordination(
    stage: Stage, spans: tuple[tuple[int, int], ...], disk_ns: int
) -> None:
    """The clock tells 10 when the need is sent and 20 when the grant is there."""
    next(stage.clock_ns)
    reads = tuple(ReadSpan(*span) for span in spans)
    locations = tuple(map(stage.location, stage.used))
    stage.link.answer = lambda need: [Grant(LAYER, locations, reads, 0, False, STEP)]
    stage.run()
    assert stage.feed.waiting.disk_ns == disk_ns
    assert stage.feed.waiting.coordination_ns == 10 - disk_ns


def test_waits_of_what_comes_together_count_once(stage: Stage) -> None:
    """The clock tells 10 when the need is sent, and ten more with each message that is taken."""
    next(stage.clock_ns)
    first, *others = stage.used
    answer = [stage.coming([first], others), *map(stage.notice, others)]
    stage.link.answer = lambda need: answer
    stage.run()
    waiting = stage.feed.waiting
    assert waiting.disk_ns == 2  # of the one span that all notices tell
    assert waiting.disk_ns + waiting.coordination_ns == 10 * len(answer)
