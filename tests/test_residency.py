"""Routing of experts: scripts of events, and random runs against a plain model of the cache."""

import random

import pytest
from simulation import engine, need, policy_geometry

from coordinator.core.actions import ToCompute, ToWorker
from coordinator.core.frequency import Lfu
from coordinator.core.hot_set import Calibrated, Static
from coordinator.core.policies import LayerLru, Lru, Slru
from coordinator.core.slots import SlotState
from coordinator.core.state import (
    FromCompute,
    FromReader,
    PoolTarget,
    ReaderCondemned,
    ReaderDied,
    ReaderReady,
)
from shm.messages import (
    Abort,
    Grant,
    ReadFailed,
    ReadSlabs,
    ReadSpan,
    Release,
    SlabsReady,
    SlotLease,
)

POLICIES = {
    "lru": lambda g: Lru(g),
    "layer-lru": lambda g: LayerLru(g),
    "lfu": lambda g: Lfu(g),
    "slru": lambda g: Slru(g),
    "static": lambda g: Static(g, {(0, 1): 5.0, (1, 2): 4.0, (2, 3): 3.0}, lambda n: n - 2),
    "calibrated": lambda g: Calibrated(g, {}),
}


def test_hits_are_granted_while_misses_are_read() -> None:
    """The disk is asked first: what is granted may keep every core busy."""
    run = engine(1, 8, 8)
    run.run_layer(need(0, [1, 2]))
    run.inbox.clear()
    actions = run.handle(FromCompute(need(0, [2, 3])))
    first, second = actions
    assert [(read.layer, read.expert) for read in first.message.reads] == [(0, 3)]
    assert [location.expert for location in second.message.locations] == [2]


def test_reads_come_before_the_rest_is_decided() -> None:
    run = engine(1, 8, 8)
    run.run_layer(need(0, [1, 2]))
    counters = run.core.residency.counters
    n_before = counters.requests
    actions = iter(run.core.decide(FromCompute(need(0, [2, 3]))))
    first = next(actions)
    assert isinstance(first, ToWorker)
    assert counters.requests == n_before
    (rest,) = actions
    assert isinstance(rest, ToCompute)
    assert isinstance(rest.message, Grant)
    assert counters.requests == n_before + 2


def test_a_reader_is_condemned_while_a_need_is_decided() -> None:
    """It takes no reads, which shows at once: what it will never bring is granted when it comes."""
    run = engine(1, 8, 8)
    actions = iter(run.core.decide(FromCompute(need(0, [3]))))
    name = next(actions).name
    run.handle(ReaderCondemned(name))
    (grant,) = [action.message for action in actions]
    assert grant.on_the_way == ()
    run.under_way[name].clear()
    run.handle(ReaderDied(name))
    run.handle(ReaderReady(name, 2))
    run.inbox.clear()
    run.complete_all_reads()
    assert [each.expert for message in run.inbox for each in message.locations] == [3]


def test_a_slot_in_use_is_not_evicted() -> None:
    run = engine(1, 8, 4)
    _, held = run.run_layer(need(0, [0, 1, 2, 3]))
    assert len(held) == 4
    of_expert_0 = tuple(lease for lease in held if lease.slot == 0)
    run.handle(FromCompute(need(0, [4], released=of_expert_0)))
    assert run.core.residency.slots.find((0, 0)) is None
    assert all(run.core.residency.slots.find((0, expert)) for expert in (1, 2, 3))


def test_a_layer_larger_than_the_pool_goes_in_waves() -> None:
    run = engine(1, 8, 2)
    computed, _ = run.run_layer(need(0, list(range(8))))
    assert sorted(computed) == list(range(8))
    assert run.core.residency.counters.misses == 8


def test_late_double_and_foreign_answers_are_dropped() -> None:
    run = engine(1, 8, 4)
    run.handle(FromCompute(need(0, [1])))
    read = run.under_way["io0"][0]
    for name, lease in (
        ("io1", read.lease),
        ("io0", SlotLease(read.lease.slot, read.lease.generation + 1)),
        ("io0", SlotLease(2**62, 1)),
        ("nobody", read.lease),
    ):
        assert run.handle(FromReader(name, SlabsReady(lease, 1, 2, 3, 0))) == []
    assert len(run.handle(FromReader("io0", SlabsReady(read.lease, 1, 2, 3, 0)))) == 1
    assert run.handle(FromReader("io0", SlabsReady(read.lease, 1, 2, 3, 0))) == []
    assert run.core.residency.counters.stale_answers == 5


def test_a_failed_read_aborts_the_step_and_frees_the_slot() -> None:
    run = engine(1, 8, 4)
    run.handle(FromCompute(need(0, [1])))
    read = run.under_way["io0"].pop()
    actions = run.core.residency.handle_failed(
        "io0", ReadFailed(read.lease, 5, "EIO at 4096", False)
    )
    assert any(getattr(action, "message", None) == Abort(1) for action in actions)
    run.core.residency.abort_layer()
    run.core.check()
    assert run.core.residency.slots.count(SlotState.FREE) == 4


def test_a_changed_model_stops_everything() -> None:
    run = engine(1, 8, 4)
    run.handle(FromCompute(need(0, [1])))
    read = run.under_way["io0"].pop()
    (action,) = run.handle(FromReader("io0", ReadFailed(read.lease, 0, "m.gguf shrank", True)))
    assert action.exit_code == 3


def test_standing_grants_come_when_a_layer_is_whole_and_end_when_revoked() -> None:
    run = engine(2, 4, 8)
    _, held = run.run_layer(need(0, [0, 1, 2, 3]))
    run.inbox.clear()
    run.handle(FromCompute(need(0, [1], released=held)))
    (grant,) = run.inbox
    assert isinstance(grant, Grant)
    assert grant.standing
    assert len(grant.locations) == 4
    run.core.check()
    assert all(slot.pins == 0 for slot in run.core.residency.slots.slots)
    revoke, punch, *_ = run.handle(PoolTarget((7,)))
    assert revoke.message.layers == (0,)
    assert len(punch.slots) == 1


def test_a_prompt_keeps_to_its_layers_share() -> None:
    run = engine(2, 8, 8)
    _, held = run.run_layer(need(1, [0, 1, 2, 3], n_recent=1))
    run.run_layer(need(0, list(range(8)), released=held, n_recent=1))
    assert run.core.residency.slots.n_of_layer(1) == 4
    assert run.core.residency.slots.n_of_layer(0) == 4


def test_preload_fills_free_slots_only() -> None:
    run = engine(1, 8, 4)
    for action in run.core.residency.preload([(0, expert) for expert in range(8)]):
        run.under_way[action.name].extend(action.message.reads)
    while any(run.under_way.values()):
        run.complete_some_read()
    assert sorted(key for key, _ in run.core.residency.slots.resident()) == [
        (0, e) for e in range(4)
    ]


def test_a_whole_layer_is_read_for_one_miss_and_counts_when_all_is_there() -> None:
    run = engine(2, 4, 8, n_readers=1, credit=8, whole_layers=True)
    actions = run.handle(FromCompute(need(0, [2])))
    (reads,) = [action.message.reads for action in actions if isinstance(action.message, ReadSlabs)]
    assert [(read.layer, read.expert) for read in reads] == [(0, 2), (0, 0), (0, 1), (0, 3)]
    grants = []
    for read in reads:
        answer = SlabsReady(read.lease, 1, 5 + read.expert, 1000, 0)
        grants += run.core.residency.handle_ready("io0", answer)
    (grant,) = grants
    assert [location.expert for location in grant.message.locations] == [2]
    assert grant.message.reads == (ReadSpan(1, 8),), "until the last of the layer was there"
    counters = run.core.residency.counters
    assert (counters.requests, counters.misses) == (1, 1)
    assert (counters.reads, counters.bytes_read) == (4, 4000)
    computed, _ = run.run_layer(need(0, [0, 1, 3], (grant.message.locations[0].lease,)))
    assert computed == [0, 1, 3]
    assert counters.hits == 3


@pytest.mark.parametrize(("n_slots", "n_reads"), [(2, 2), (5, 5), (8, 8), (20, 8)])
def test_a_whole_layer_is_read_as_far_as_slots_go(n_slots: int, n_reads: int) -> None:
    run = engine(2, 8, n_slots, whole_layers=True)
    computed, held = run.run_layer(need(0, [5]))
    assert computed == [5]
    assert run.core.residency.counters.reads == n_reads
    run.run_layer(need(1, list(range(8)), held))  # in waves where there is no room for more
    assert run.core.residency.counters.misses == 9


def test_a_layer_goes_on_without_an_expert_that_nobody_asked_for() -> None:
    run = engine(1, 3, 3, n_readers=1, credit=8, whole_layers=True)
    run.handle(FromCompute(need(0, [0])))
    asked, other, last = run.under_way["io0"]
    residency = run.core.residency
    assert residency.handle_ready("io0", SlabsReady(asked.lease, 1, 2, 9, 0)) == []
    assert residency.handle_failed("io0", ReadFailed(other.lease, 5, "EIO", False)) == []
    (grant,) = residency.handle_ready("io0", SlabsReady(last.lease, 1, 2, 9, 0))
    assert [location.expert for location in grant.message.locations] == [0]
    run.core.check()


@pytest.mark.parametrize(
    ("policy", "whole_layers"), [*[(name, False) for name in POLICIES], ("lru", True)]
)
@pytest.mark.parametrize("n_slots", [2, 5, 12, 40])
def test_decisions_do_not_depend_on_the_order_of_reads_or_on_deaths(
    policy: str, n_slots: int, whole_layers: bool
) -> None:
    """Hits, misses and what is resident after each layer: the same for every completion order.
    Where slots are found written over, the same are resident; an expert that is being read again
    when it is needed is a miss. What a dying reader had told compute of is read again, and cannot
    be a victim meanwhile: then only that all is computed is sure."""
    histories = []
    for seed, kill_probability, lose_probability, notice_probability in (
        (0, 0.0, 0.0, 0.0), (1, 0.0, 0.0, 0.7), (2, 0.3, 0.0, 0.0), (3, 0.0, 0.03, 0.5),
        (4, 0.1, 0.03, 0.0), (8, 0.1, 0.03, 0.5),
    ):  # fmt: skip
        make = POLICIES[policy]
        chosen = make(policy_geometry(4, n_slots))
        run = engine(
            4, 10, n_slots, policy=chosen, seed=seed, whole_layers=whole_layers,
            notice_probability=notice_probability,
        )  # fmt: skip
        script = random.Random(99)
        history = []
        held: tuple[SlotLease, ...] = ()
        for number in range(120):
            experts = script.sample(range(10), script.randint(1, 7))
            is_prompt = script.random() < 0.2
            _, held = run.run_layer(
                need(number % 4, experts, held, int(is_prompt)), kill_probability, lose_probability
            )
            counters = run.core.residency.counters
            held_keys = sorted(slot.key for slot in run.core.residency.slots.slots if slot.key)
            history.append((counters.hits, counters.misses, held_keys))
        histories.append(history)
        if kill_probability:
            assert run.n_deaths > 0
        if notice_probability and n_slots < 40 and not whole_layers:
            assert run.n_used_early > 0
        assert (run.n_lost > 0) == (lose_probability > 0)
        assert run.core.residency.counters.slots_lost == run.n_lost
    assert histories[0] == histories[1] == histories[2]
    resident = [[keys for *_, keys in history] for history in histories]
    assert resident[0] == resident[3] == resident[4]


@pytest.mark.parametrize("n_slots", [3, 8, 20])
def test_lru_equals_a_plain_model(n_slots: int) -> None:
    """Against a list kept in order of use; needs never exceed the pool, so that no waves mix in."""
    run = engine(3, 10, n_slots, standing_grants=False)
    script = random.Random(5)
    order: list[tuple[int, int]] = []
    hits = 0
    held: tuple[SlotLease, ...] = ()
    for number in range(400):
        layer = number % 3
        experts = sorted(script.sample(range(10), script.randint(1, min(3, n_slots))))
        present = [(layer, e) for e in experts if (layer, e) in order]
        hits += len(present)
        for key in present:
            order.remove(key)
            order.append(key)
        for key in [(layer, e) for e in experts if (layer, e) not in present]:
            if len(order) == n_slots:
                order.pop(0)
            order.append(key)
        _, held = run.run_layer(need(layer, experts, held))
        assert run.core.residency.counters.hits == hits
        assert sorted(key for key, _ in run.core.residency.slots.resident()) == sorted(order)


def test_release_of_an_aborted_step_is_ignored() -> None:
    run = engine(1, 8, 4)
    _, held = run.run_layer(need(0, [1]))
    run.core.residency.abort_layer()
    run.core.residency.slots.drop(run.core.residency.slots.slots[held[0].slot])
    run.handle(FromCompute(need(0, [2])))
    assert run.handle(FromCompute(Release(held))) == []
