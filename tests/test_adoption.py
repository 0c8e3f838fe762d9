"""Compute takes over layers that stay: part by part, only between steps, and gives them back."""

from collections.abc import Sequence

import pytest
from simulation import SLAB_BYTES, Engine, done, engine, need, policy_geometry

from coordinator.core.actions import Action, PunchSlots, ToCompute, ToWorker, VacateSlots
from coordinator.core.policies import Policy
from coordinator.core.policy_choice import POLICIES
from coordinator.core.slots import SlotState
from coordinator.core.state import (
    ComputeDied,
    ComputeReady,
    Continue,
    FromCompute,
    FromReader,
    NewRequest,
    PoolTarget,
    ReaderDied,
    ReaderReady,
)
from shm.messages import (
    Adopt,
    Adopted,
    Dropped,
    Grant,
    Need,
    ReadFailed,
    Revoke,
    Sampling,
    SlabsReady,
    SlotLease,
    SlotsPunched,
    Step,
    Submit,
)

N_LAYERS, N_EXPERTS = 4, 4  # three experts move at once
N_ALL = N_LAYERS * N_EXPERTS


def loaded(
    *,
    adopts: bool = True,
    n_readers: int = 2,
    shape: tuple[int, int, int] = (N_LAYERS, N_EXPERTS, N_ALL),
    policy: Policy | None = None,
) -> Engine:
    """Everything is read and nothing has moved."""
    run = engine(*shape, n_readers=n_readers, policy=policy)
    run.handle(ComputeReady(adopts))
    preload = run.core.residency.preload(run.core.residency.geometry.all_keys())
    for action in preload:
        assert isinstance(action, ToWorker)
        run.under_way[action.name].extend(action.message.reads)
    read_all(run)
    return run


def read_all(run: Engine) -> None:
    while any(run.under_way.values()):
        run.complete_some_read()


def settled() -> Engine:
    """Everything has moved."""
    run = loaded()
    settle(run)
    assert run.core.residency.slots.count(SlotState.ADOPTED) == N_ALL
    return run


def settle(run: Engine) -> list[int]:
    """Compute does what it is told until nothing comes any more; the layers that moved."""
    moved = []
    while run.handle(Continue()) or run.inbox:
        while run.inbox:
            match run.inbox.pop(0):
                case Adopt(layer, _):
                    moved.append(layer)
                    run.handle(FromCompute(Adopted(layer, True)))
                case Revoke(layers):
                    run.handle(FromCompute(Dropped(layers)))
        read_all(run)
    assert run.core.residency.n_to_settle == 0
    return sorted(set(moved))


def begin_step(run: Engine) -> Step:
    submit = Submit(1, (5,), Sampling(0.0, 0, 1.0, 0.0, 1.0, 1), 64, False)
    run.handle(NewRequest(submit, 0, frozenset()))
    run.handle(Continue())
    (step,) = (message for message in run.inbox if isinstance(message, Step))
    run.inbox.clear()
    return step


def slots_of(actions: Sequence[Action], kind: type[PunchSlots] | type[VacateSlots]) -> list[int]:
    return [slot for a in actions if isinstance(a, kind) for slot in a.slots]


def test_what_nobody_asked_compute_to_adopt_says_nothing() -> None:
    run = loaded()
    assert run.handle(FromCompute(Adopted(0, True))) == []
    run.handle(Continue())
    assert isinstance(run.inbox[-1], Adopt)
    assert run.handle(FromCompute(Adopted(1, True))) == [], "another layer is under way"
    run.core.check()
    assert settle(run)
    assert run.core.residency.slots.count(SlotState.ADOPTED) == N_ALL


def test_what_compute_was_not_told_to_give_up_stays_its_own() -> None:
    run = settled()
    assert run.handle(FromCompute(Dropped((0, 1)))) == []
    assert run.core.residency.slots.count(SlotState.ADOPTED) == N_ALL
    run = loaded()
    run.handle(Continue())
    assert run.handle(FromCompute(Dropped((0,)))) == [], "on its way there"
    assert settle(run)
    assert run.core.residency.slots.count(SlotState.ADOPTED) == N_ALL


def test_a_layer_moves_part_by_part_one_at_a_time() -> None:
    run = loaded()
    standing, adopt = (a.message for a in run.handle(Continue()) if isinstance(a, ToCompute))
    assert isinstance(standing, Grant) and standing.standing and standing.layer == 0
    assert [location.expert for location in adopt.locations] == [0, 1, 2]
    assert run.handle(Continue()) == [], "one part is under way"
    slots = tuple(location.lease.slot for location in adopt.locations)
    punched = SlotsPunched(slots)
    assert run.handle(FromCompute(Adopted(0, True))) == [
        VacateSlots(slots), ToWorker("io0", punched), ToWorker("io1", punched),
    ]  # fmt: skip
    (action,) = run.handle(Continue())
    assert isinstance(action, ToCompute)
    assert [location.expert for location in action.message.locations] == [3]
    run.handle(FromCompute(Adopted(0, True)))
    standing, adopt = (a.message for a in run.handle(Continue()) if isinstance(a, ToCompute))
    assert (standing.layer, adopt.layer) == (1, 1)


def test_a_layer_moves_while_later_ones_are_read() -> None:
    run = engine(2, N_EXPERTS, 2 * N_EXPERTS, n_readers=1, credit=1)
    run.handle(ComputeReady(True))
    preload = run.core.residency.preload(run.core.residency.geometry.all_keys())
    for action in preload:
        assert isinstance(action, ToWorker)
        run.under_way[action.name].extend(action.message.reads)
    for n_read in range(N_EXPERTS):
        assert run.handle(Continue()) == [], f"{n_read} experts are there"
        run.complete_some_read()
    assert any(isinstance(m, Adopt) for m in run.inbox) or run.handle(Continue())
    assert run.core.residency.n_loading == N_EXPERTS


def test_nothing_moves_where_it_does_not_pay() -> None:
    run = loaded(adopts=False)
    assert run.handle(Continue()) == []
    assert run.core.residency.n_to_settle == 0


def test_nothing_moves_while_a_step_runs() -> None:
    run = loaded()
    run.core.residency.compute_ready(adopts=False)
    step = begin_step(run)
    run.core.residency.compute_ready(adopts=True)
    assert run.handle(Continue()) == []
    run.handle(FromCompute(done(step.step)))
    assert any(
        isinstance(a, ToCompute) and isinstance(a.message, Adopt) for a in run.handle(Continue())
    )


def test_without_memory_for_copies_everything_stays_in_the_pool() -> None:
    run = loaded()
    run.handle(Continue())
    assert run.handle(FromCompute(Adopted(0, False))) == []
    assert run.handle(Continue()) == []
    assert run.core.residency.slots.count(SlotState.READY) == N_ALL
    assert run.core.residency.n_to_settle == 0


@pytest.mark.parametrize(
    ("n_slots", "revoked"),
    [
        (15, (3,)),
        (14, (3,)),  # half of its experts stay
        (13, (2, 3)),
        (12, (2, 3)),
        (11, (1, 2, 3)),
        (10, (1, 2, 3)),
        (9, (0, 1, 2, 3)),
        (2, (0, 1, 2, 3)),
    ],
)
def test_a_smaller_pool_takes_back_as_many_layers_as_it_must(
    n_slots: int, revoked: tuple[int, ...]
) -> None:
    run = settled()
    assert run.handle(PoolTarget((n_slots,))) == [ToCompute(Revoke(revoked))]
    actions = run.handle(FromCompute(Dropped(revoked)))
    assert len(slots_of(actions, PunchSlots)) == N_ALL - n_slots
    slots = run.core.residency.slots
    assert slots.usable_of_class() == (n_slots,)
    assert slots.count(SlotState.ADOPTED) == (N_LAYERS - len(revoked)) * N_EXPERTS
    computed, held = run.run_layer(need(3, [0, 1, 2, 3]))
    assert sorted(computed) == [0, 1, 2, 3]
    run.core.residency.end_layer(held)
    assert slots.count(SlotState.ADOPTED) == (N_LAYERS - len(revoked)) * N_EXPERTS


def test_compute_gives_a_layer_back_in_the_middle_of_a_step() -> None:
    """It reads of the end before it comes to the layer, and asks for it like for any other."""
    run = settled()
    step = begin_step(run)
    assert run.handle(PoolTarget((14,))) == [ToCompute(Revoke((3,)))]
    assert len(slots_of(run.handle(FromCompute(Dropped((3,)))), PunchSlots)) == 2
    computed, held = run.run_layer(need(3, [0, 3]))
    assert computed == [0, 3] or computed == [3, 0]
    run.handle(FromCompute(done(step.step, held)))


def test_what_others_wait_for_is_not_given_up_before_more_is_free() -> None:
    """Two shrinks at once: the slots of the first layer that is gone are not all retired while a
    step may need some and those of the second are still to come."""
    run = settled()
    begin_step(run)
    run.handle(PoolTarget((14,)))
    run.handle(PoolTarget((10,)))
    run.inbox.clear()
    assert len(slots_of(run.handle(FromCompute(Dropped((3,)))), PunchSlots)) == 2
    run.handle(FromCompute(Need(1, 3, need(3, [0, 1, 2]).experts, (), ())))
    actions = run.handle(FromCompute(Dropped((1, 2))))
    assert len(slots_of(actions, PunchSlots)) == 4
    assert run.core.residency.slots.usable_of_class() == (10,)


def test_what_was_given_up_comes_back_and_moves_again() -> None:
    run = settled()
    run.handle(PoolTarget((14,)))
    settle(run)
    run.handle(PoolTarget((15,)))
    assert settle(run) == [], "not whole yet"
    run.handle(PoolTarget((N_ALL,)))
    read_all(run)
    assert settle(run) == [3]
    assert run.core.residency.slots.count(SlotState.ADOPTED) == N_ALL


def test_the_pool_is_whole_again_before_compute_has_let_go() -> None:
    run = settled()
    run.handle(PoolTarget((14,)))
    run.handle(PoolTarget((N_ALL,)))
    assert settle(run) == [3]
    assert run.core.residency.slots.count(SlotState.ADOPTED) == N_ALL


def test_a_layer_on_its_way_stays_until_compute_has_looked_at_it() -> None:
    run = loaded()
    run.handle(Continue())
    actions = run.handle(PoolTarget((2,)))
    assert len(slots_of(actions, PunchSlots)) == N_ALL - 3 - 2, "but the smallest pool"
    assert all(run.core.residency.slots.find((0, expert)) for expert in range(N_EXPERTS))
    run.handle(FromCompute(Adopted(0, True)))
    run.handle(FromCompute(Dropped((0,))))
    assert run.core.residency.slots.usable_of_class() == (2,)


def test_what_a_dead_compute_worker_had_is_read_again() -> None:
    run = settled()
    actions = run.handle(ComputeDied("killed"))
    reads = [r for a in actions if isinstance(a, ToWorker) for r in a.message.reads]
    assert len(reads) == 4, "as many as the readers take at once"
    assert run.core.residency.n_loading == N_ALL
    assert run.handle(Continue()) == []
    read_all(run)
    assert settle(run) == [], "the new one has not said that it pays"
    run.handle(ComputeReady(True))
    assert settle(run) == list(range(N_LAYERS))


def test_a_dead_compute_worker_that_read_for_itself_has_it_read_by_the_next() -> None:
    run = loaded(n_readers=1)
    settle(run)
    run.handle(ReaderDied("io0"))
    assert run.handle(ComputeDied("killed")) == []
    run.handle(ReaderReady("io0", 2))
    read_all(run)
    assert run.core.residency.slots.count(SlotState.READY) == N_ALL


def test_a_read_that_fails_leaves_its_layer_in_the_pool() -> None:
    run = settled()
    run.handle(ComputeDied("killed"))
    run.handle(ComputeReady(True))
    name = next(name for name, reads in run.under_way.items() if reads)
    lost = run.under_way[name].pop(0)
    slot = run.core.residency.slots.slots[lost.lease.slot]
    run.handle(FromReader(name, ReadFailed(lost.lease, 5, "EIO", False)))
    assert slot.state is SlotState.FREE
    read_all(run)
    assert settle(run) == [layer for layer in range(N_LAYERS) if layer != lost.layer]
    late = SlabsReady(lost.lease, 1, 2, SLAB_BYTES, 0)
    assert run.handle(FromReader(name, late)) == []


@pytest.mark.parametrize("name", ["static", "calibrated"])
def test_what_is_left_of_the_pool_may_be_hot_from_end_to_end(name: str) -> None:
    """The hot set takes its room from all slots, and the slots with its colder keys are adopted."""
    n_layers, n_experts = 8, 16
    n_slots = n_layers * n_experts
    keys = [(layer, expert) for layer in range(n_layers) for expert in range(n_experts)]
    usage = {key: float(number) for number, key in enumerate(keys)}
    policy = POLICIES[name](policy_geometry(n_layers, n_slots), usage, 2)
    run = loaded(shape=(n_layers, n_experts, n_slots), policy=policy)
    settle(run)
    run.handle(PoolTarget((n_slots - 2 * n_experts,)))
    settle(run)
    slots = run.core.residency.slots
    assert slots.count(SlotState.ADOPTED) == n_slots // 2
    held: tuple[SlotLease, ...] = ()
    for number in range(60):
        first = number // 3 * 2 % n_experts
        experts = [first, first + 1]
        computed, held = run.run_layer(need(5 + number % 3, experts, held))
        assert sorted(computed) == sorted(experts)
    left = {key for key, slot in slots.resident() if slot.state is SlotState.READY}
    assert left <= policy.hot
