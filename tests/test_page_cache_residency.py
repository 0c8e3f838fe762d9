import random
from collections.abc import Iterable
from typing import Any

import pytest

from coordinator.core.actions import Action, RequestsFailed, StopWith, ToCompute, ToWorker
from coordinator.core.geometry import PoolGeometry
from coordinator.core.page_cache_residency import PageCacheResidency
from coordinator.core.prefetch import Prefetch
from shm.messages import (
    Abort,
    ExpertUse,
    Grant,
    Location,
    Need,
    ReadFailed,
    ReadSlabs,
    SlabRead,
    SlabsReady,
    SlotLease,
)

N_EXPERTS, LAYERS = 4, (0, 1, 3)
STARTS = (0, 100_000, 300_000)


def ranges_of(layer: int, expert: int) -> tuple[tuple[int, int, int], ...]:
    """Gate in the second file, up and down in the first."""
    first = 1000 * layer + 10 * expert
    return ((1, first, 10), (0, first + 20_000, 10), (0, first + 40_000, 10))


def residency(
    *, warms: bool = True, standing: bool = True, prefetch: Prefetch | None = None
) -> PageCacheResidency:
    geometry = PoolGeometry([], [], dict.fromkeys(LAYERS, 0), N_EXPERTS, ranges_of, 4096)
    return PageCacheResidency(
        geometry, STARTS, warms=warms, standing_grants=standing, prefetch=prefetch
    )


def need(layer: int, experts: Iterable[int], n_recent: int = 0) -> Need:
    return Need(7, layer, tuple(ExpertUse(e, 2, n_recent) for e in experts), (), ())


def reads_of(actions: list[Action]) -> list[tuple[str, SlabRead]]:
    return [
        (action.name, read)
        for action in actions
        if isinstance(action, ToWorker) and isinstance(action.message, ReadSlabs)
        for read in action.message.reads
    ]


def to_compute(actions: list[Action]) -> list[Any]:
    return [action.message for action in actions if isinstance(action, ToCompute)]


def ready(read: SlabRead, n_bytes: int = 30) -> SlabsReady:
    return SlabsReady(read.lease, 100, 250, n_bytes, 0)


def test_without_readers_a_layer_is_granted_whole_and_for_good() -> None:
    core = residency(warms=False)
    (grant,) = to_compute(core.serve(need(1, [0, 2])))
    assert grant.standing and grant.layer == 1 and grant.n_waiting == 0
    assert [location.expert for location in grant.locations] == [0, 1, 2, 3]
    # the region is that of the first file; its second file begins 100,000 bytes later
    assert grant.locations[2] == Location(2, SlotLease(6, 0), 1, 101_020, 21_020, 41_020)
    assert core.n_loading == 0
    assert core.counters.requests == 2
    assert core.uses == {(1, 0): 2, (1, 2): 2}
    core.check()


def test_a_trace_needs_every_message() -> None:
    core = residency(warms=False, standing=False)
    for _ in range(2):
        (grant,) = to_compute(core.serve(need(3, [1, 3])))
        assert not grant.standing
        assert [location.expert for location in grant.locations] == [1, 3]


def test_each_expert_is_granted_when_its_reader_answered() -> None:
    core = residency()
    assert core.worker_ready("io0", 2) == []
    actions = core.serve(need(1, [0, 2, 3]))
    assert to_compute(actions) == []
    first, second = (read for _, read in reads_of(actions))
    assert (first.layer, first.expert, second.expert) == (1, 0, 2)
    assert [(r.file, r.file_offset, r.n_bytes) for r in first.ranges] == list(ranges_of(1, 0))
    assert core.n_reading("io0") == 2 and core.n_loading == 3
    actions = core.handle_ready("io0", ready(second))
    (grant,) = to_compute(actions)
    assert [location.expert for location in grant.locations] == [2]
    assert [(span.start_ns, span.stop_ns) for span in grant.reads] == [(100, 250)]
    assert not grant.standing and grant.n_waiting == 0
    ((_, third),) = reads_of(actions)
    for read in (first, third):
        (grant,) = to_compute(core.handle_ready("io0", ready(read)))
        assert [location.expert for location in grant.locations] == [read.expert]
        core.check()
    assert core.end_layer(()) == []
    counters = core.counters
    assert (counters.reads, counters.bytes_read, counters.read_ns) == (3, 90, 450)
    assert (counters.hits, counters.misses, counters.evictions) == (0, 0, 0)
    assert core.handle_ready("io0", ready(first)) == [], "told twice"
    assert core.counters.stale_answers == 1


def test_what_a_dead_reader_left_is_warmed_by_others() -> None:
    core = residency()
    core.worker_ready("io0", 4)
    told = [read for _, read in reads_of(core.serve(need(0, [0, 1, 2])))]
    core.handle_ready("io0", ready(told[1]))
    assert core.worker_condemned("io0") == []
    assert core.worker_died("io0") == []
    core.check()
    again = reads_of(core.worker_ready("io1", 4))
    assert again == [("io1", told[0]), ("io1", told[2])]
    assert to_compute(core.handle_ready("io0", ready(told[0]))) == [], "the answer of a dead one"
    for _, read in again:
        assert len(to_compute(core.handle_ready("io1", ready(read)))) == 1
    core.check()


@pytest.mark.parametrize("model_changed", [False, True])
def test_pages_that_cannot_be_had(model_changed: bool) -> None:
    core = residency()
    core.worker_ready("io0", 4)
    told = [read for _, read in reads_of(core.serve(need(0, [0, 1])))]
    failed = ReadFailed(told[0].lease, 5, "disk on fire", model_changed)
    actions = core.handle_failed("io0", failed)
    if model_changed:
        (stop,) = actions
        assert isinstance(stop, StopWith) and stop.exit_code == 3
        assert "model changed on disk" in stop.text
        return
    assert actions == [RequestsFailed("layer 0, expert 0: disk on fire"), ToCompute(Abort(7))]
    core.check()
    assert core.abort_layer() == []
    assert to_compute(core.handle_ready("io0", ready(told[1]))) == [], "nobody waits for it"
    core.check()
    # nobody needs it: no reason to end anything
    core.serve(need(0, [2]))
    core.compute_died()
    ((_, read),) = reads_of(core.serve(need(1, [3])))
    assert core.handle_failed("io0", ReadFailed(told[0].lease, 5, "late", False)) == []
    assert len(to_compute(core.handle_ready("io0", ready(read)))) == 1


class Acting(Prefetch):
    """Acts at once: what a trial decides is tested with `prefetch`."""

    is_acting = True


def test_a_guess_that_becomes_a_demand_is_read_once() -> None:
    core = residency(prefetch=Acting("previous-token"))
    core.worker_ready("io0", 8)
    for layer, experts in ((0, [0, 3]), (1, [1, 2])):  # of a token: what the next one will guess
        for _, read in reads_of(core.serve(need(layer, experts))):
            core.handle_ready("io0", ready(read))
    guesses = []
    for _, read in reads_of(core.serve(need(0, [0, 3]))):
        guesses += reads_of(core.handle_ready("io0", ready(read)))
    assert [(read.layer, read.expert) for _, read in guesses] == [(1, 1), (1, 2)]
    ((_, demand),) = reads_of(core.serve(need(1, [1, 3])))
    assert (demand.layer, demand.expert) == (1, 3)
    (grant,) = to_compute(core.handle_ready("io0", ready(guesses[0][1])))
    assert [location.expert for location in grant.locations] == [1]
    assert to_compute(core.handle_ready("io0", ready(guesses[1][1]))) == []
    counters = core.prefetch.counters
    assert (counters.issued, counters.used, counters.wasted) == (2, 1, 1)
    core.check()


def test_a_demand_overtakes_a_guess() -> None:
    core = residency(prefetch=Acting("previous-token"))
    core.worker_ready("io0", 1)

    def read_all(actions: list[Action]) -> list[tuple[int, int]]:
        found = []
        while reads := reads_of(actions):
            ((_, read),) = reads
            found.append((read.layer, read.expert))
            actions = core.handle_ready("io0", ready(read))
        return found

    for layer, experts in ((0, [0, 3]), (1, [1, 2])):
        read_all(core.serve(need(layer, experts)))
    actions = core.serve(need(0, [0, 3]))
    for _ in range(2):
        ((_, read),) = reads_of(actions)
        actions = core.handle_ready("io0", ready(read))
    ((_, guess),) = reads_of(actions)
    assert (guess.layer, guess.expert) == (1, 1), "and (1, 2) is queued"
    assert core.serve(need(1, [0, 3])) == []
    demanded = read_all(core.handle_ready("io0", ready(guess)))
    assert demanded[:3] == [(1, 0), (1, 3), (1, 2)]
    core.check()


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_grant_every_expert_once(seed: int) -> None:
    rng = random.Random(seed)
    core = residency(prefetch=Acting("previous-token") if seed % 2 else None)
    under_way: list[tuple[str, SlabRead]] = []
    for name in ("io0", "io1"):
        under_way += reads_of(core.worker_ready(name, 2))
    for _ in range(30):
        for layer in LAYERS:
            wanted = set(rng.sample(range(N_EXPERTS), rng.randint(1, N_EXPERTS)))
            actions = core.serve(need(layer, sorted(wanted)))
            while True:
                core.check()
                under_way += reads_of(actions)
                for grant in to_compute(actions):
                    assert isinstance(grant, Grant) and grant.layer == layer
                    for location in grant.locations:
                        wanted.remove(location.expert)
                if not wanted:
                    break
                name, read = under_way.pop(rng.randrange(len(under_way)))
                if rng.random() < 0.1:
                    under_way = [item for item in under_way if item[0] != name]
                    actions = core.worker_died(name) + core.worker_ready(name, 2)
                    continue
                actions = core.handle_ready(name, ready(read))
    assert core.counters.stale_answers == 0
