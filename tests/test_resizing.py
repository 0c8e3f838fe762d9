"""The pool gets smaller and larger while layers are computed."""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from simulation import Engine, done, engine, need, policy_geometry

from coordinator.core.actions import Action, PunchSlots, RestoreSlots, ToCompute, ToWorker
from coordinator.core.frequency import Lfu
from coordinator.core.hot_set import Static
from coordinator.core.policies import LayerLru, Lru, Policy, PolicyGeometry, Slru
from coordinator.core.slots import SlotState
from coordinator.core.state import ComputeDied, Continue, FromCompute, NewRequest, PoolTarget
from shm.messages import Grant, Revoke, Sampling, SlotLease, SlotsPunched, Step, Submit

USAGE = {(0, expert): 9.0 - expert for expert in range(9)} | {(1, 2): 4.0}
POLICIES: Mapping[str, Callable[[PolicyGeometry], Policy]] = {
    "lru": Lru,
    "layer-lru": LayerLru,
    "lfu": Lfu,
    "slru": Slru,
    "static": lambda g: Static(g, USAGE, lambda n_slots: n_slots - 2),
}


def punched(actions: Sequence[Action]) -> list[int]:
    return [slot for action in actions if isinstance(action, PunchSlots) for slot in action.slots]


def restored(actions: Sequence[Action]) -> list[int]:
    return [slot for action in actions if isinstance(action, RestoreSlots) for slot in action.slots]


def resident(run: Engine) -> set[tuple[int, int]]:
    return {key for key, _ in run.core.residency.slots.resident()}


def begin_step(run: Engine) -> Step:
    """A request of one token, and the step that computes it."""
    submit = Submit(1, (5,), Sampling(0.0, 0, 1.0, 0.0, 1.0, 1), 64, False)
    run.handle(NewRequest(submit, 0, frozenset()))
    run.inbox.clear()
    run.handle(Continue())
    (step,) = (message for message in run.inbox if isinstance(message, Step))
    run.inbox.clear()
    return step


def test_free_slots_go_first_then_the_policys_victims() -> None:
    run = engine(1, 8, 6)
    _, held = run.run_layer(need(0, [0, 1, 2, 3]))
    run.handle(FromCompute(need(0, [0, 1], released=held)))
    assert punched(run.handle(PoolTarget((5,)))) == [4]
    assert punched(run.handle(PoolTarget((4,)))) == [5]
    assert resident(run) == {(0, 0), (0, 1), (0, 2), (0, 3)}
    run.handle(PoolTarget((3,)))
    assert resident(run) == {(0, 0), (0, 1), (0, 3)}, "expert 2 was used least recently"
    counters = run.core.residency.resized
    assert (counters.shrinks, counters.slots_retired) == (3, 3)
    assert run.core.residency.counters.evictions == 1


def test_every_reader_hears_of_it() -> None:
    run = engine(1, 8, 6, n_readers=3)
    actions = run.handle(PoolTarget((4,)))
    slots = tuple(punched(actions))
    assert len(slots) == 2
    told = [action for action in actions if isinstance(action, ToWorker)]
    assert told == [ToWorker(f"io{n}", SlotsPunched(slots)) for n in range(3)]


def test_what_is_in_use_goes_when_the_step_is_over() -> None:
    run = engine(1, 8, 4)
    step = begin_step(run)
    _, held = run.run_layer(need(0, [0, 1, 2, 3]))
    assert run.handle(PoolTarget((2,))) == []
    actions = run.handle(FromCompute(done(step.step, held)))
    assert len(punched(actions)) == 2
    assert run.core.residency.slots.usable_of_class() == (2,)


def test_what_is_being_read_goes_later() -> None:
    run = engine(1, 8, 4)
    run.handle(FromCompute(need(0, [0, 1, 2])))
    assert punched(run.handle(PoolTarget((2,)))) == [3]
    _, held = finish_layer(run, [0, 1, 2])
    run.handle(FromCompute(need(0, [0], held)))
    assert len(punched(run.handle(PoolTarget((2,))))) == 1


def finish_layer(run: Engine, experts: list[int]) -> tuple[list[int], tuple[SlotLease, ...]]:
    """Complete the reads of a need that was sent already."""
    wanted, held = set(experts), []
    while wanted:
        while not run.inbox:
            run.complete_some_read()
        grant = run.inbox.pop(0)
        assert isinstance(grant, Grant)
        for location in grant.locations:
            wanted.discard(location.expert)
            held.append(location.lease)
    return experts, tuple(held)


def standing(run: Engine, n_layers: int, n_experts: int) -> None:
    """Bring all experts in and let every layer stand."""
    everything = list(range(n_experts))
    held: tuple[SlotLease, ...] = ()
    for layer in range(n_layers):
        _, held = run.run_layer(need(layer, everything, held))
    for layer in range(n_layers):
        run.inbox.clear()
        run.handle(FromCompute(need(layer, [0], held)))
        held = ()
        (grant,) = run.inbox
        assert grant.standing
    run.core.residency.end_layer(())


def test_standing_grants_end_first_and_their_slots_go_after_the_running_step() -> None:
    run = engine(2, 4, 8)
    standing(run, 2, 4)
    step = begin_step(run)
    actions = run.handle(PoolTarget((6,)))
    assert actions == [ToCompute(Revoke((0, 1)))]
    assert run.handle(PoolTarget((6,))) == [], "compute may still use all of them"
    run.run_layer(need(1, [0]))  # it heard of the end before layer 1
    actions = run.handle(FromCompute(done(step.step)))
    assert len(punched(actions)) == 2


def test_between_steps_the_slots_of_standing_grants_go_at_once() -> None:
    run = engine(2, 4, 8)
    standing(run, 2, 4)
    revoke, *rest = run.handle(PoolTarget((6,)))
    assert revoke == ToCompute(Revoke((0, 1)))
    assert len(punched(rest)) == 2


def test_a_dead_compute_worker_uses_nothing() -> None:
    run = engine(2, 4, 8)
    standing(run, 2, 4)
    begin_step(run)
    run.handle(PoolTarget((6,)))
    assert len(punched(run.handle(ComputeDied("killed")))) == 2


def test_what_comes_back_is_filled_and_stands_again() -> None:
    run = engine(2, 4, 8)
    standing(run, 2, 4)
    gone = punched(run.handle(PoolTarget((5,))))
    actions = run.handle(PoolTarget((7,)))
    assert restored(actions) == gone[:0:-1]
    assert len(actions) == 1, "nothing is read while not all fits"
    actions = run.handle(PoolTarget((8,)))
    assert restored(actions) == gone[:1]
    while any(run.under_way.values()):
        run.complete_some_read()
    assert resident(run) == {(layer, e) for layer in range(2) for e in range(4)}
    run.inbox.clear()
    run.handle(FromCompute(need(1, [2])))
    (grant,) = run.inbox
    assert grant.standing
    counters = run.core.residency.resized
    assert (counters.grows, counters.slots_restored) == (2, 3)


def test_a_hot_set_shrinks_with_the_pool_and_comes_back() -> None:
    usage = {(0, expert): 10.0 - expert for expert in range(8)}
    policy = Static(policy_geometry(1, 8), usage, lambda n_slots: n_slots - 2)
    run = engine(1, 8, 8, policy=policy)
    _, held = run.run_layer(need(0, list(range(8))))
    run.handle(FromCompute(need(0, [0], held)))
    assert len(policy.hot) == 6
    run.handle(PoolTarget((4,)))
    assert policy.hot == {(0, 0), (0, 1)}
    assert resident(run) >= policy.hot
    run.handle(PoolTarget((8,)))
    assert len(policy.hot) == 6


class Pressed(Engine):
    """The wanted size changes while reads are under way too."""

    def press(self, probability: float) -> None:
        """Perhaps want another size."""
        if self.rng.random() < probability:
            self.handle(PoolTarget((self.rng.choice([2, 3, 7, 12, 19, 20]),)))

    def complete_some_read(self, kill_probability: float = 0.0) -> None:
        """See `Engine`."""
        self.press(0.2)
        super().complete_some_read(kill_probability)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_any_sizes_at_any_time(policy: str, seed: int) -> None:
    """Every expert is computed once, from a slot that holds it."""
    n_slots = 20
    calm = engine(3, 10, n_slots, policy=POLICIES[policy](policy_geometry(3, n_slots)), seed=seed)
    run = Pressed(calm.core, calm.rng, under_way=calm.under_way)
    script = random.Random(seed)
    held: tuple[SlotLease, ...] = ()
    for number in range(150):
        experts = script.sample(range(10), script.randint(1, 8))
        computed, held = run.run_layer(need(number % 3, experts, held), 0.1)
        assert sorted(computed) == sorted(experts)
        run.press(0.4)
    assert run.n_deaths > 0
    run.core.residency.end_layer(held)
    run.handle(PoolTarget((2,)))
    while any(run.under_way.values()):
        Engine.complete_some_read(run)
    run.handle(PoolTarget((2,)))
    slots = run.core.residency.slots
    assert slots.usable_of_class() == (2,)
    assert slots.count(SlotState.RETIRED) == n_slots - 2
    run.handle(PoolTarget((n_slots,)))
    assert slots.count(SlotState.RETIRED) == 0
