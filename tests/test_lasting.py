"""Grants that are good beyond their layer: what compute does with them, and when they end."""

import dataclasses
import random
from typing import Any

import pytest
from simulation import Engine, done, engine, geometry, need, policy_geometry
from test_feed import LAYER, PoolStage, pool_stage

from coordinator.core.actions import PunchSlots, ToCompute
from coordinator.core.frequency import Lfu
from coordinator.core.state import FromCompute, FromReader, PoolTarget
from coordinator.routing.replay import replay
from shm.messages import (
    Abort,
    Evicted,
    Grant,
    KnownLayer,
    Need,
    ReadFailed,
    Release,
    SlotsLost,
    Step,
)

__all__ = ["pool_stage"]  # a fixture


def lasting(stage: PoolStage, experts: list[int], on_the_way: tuple[int, ...] = ()) -> Grant:
    return stage.coming(experts, list(on_the_way))._replace(lasting=True)


def needs_of(stage: PoolStage) -> list[Need]:
    return [message for message in stage.link.sent if isinstance(message, Need)]


# Compute


def test_what_lasts_needs_no_message(pool_stage: PoolStage) -> None:
    first, *others = pool_stage.used
    answer = [lasting(pool_stage, [first], tuple(others)), *map(pool_stage.notice, others)]
    pool_stage.link.answer = lambda need: answer
    assert pool_stage.run() == pool_stage.expected
    pool_stage.feed.take_released()
    pool_stage.link.sent.clear()
    for _ in range(2):
        assert pool_stage.run() == pool_stage.expected
    assert pool_stage.link.sent == []
    assert pool_stage.feed.take_released() == ()
    told = pool_stage.feed.take_earlier()
    assert [(known.layer, [use.expert for use in known.experts]) for known in told] == [
        (LAYER, pool_stage.used)
    ] * 2
    assert sum(use.n_tokens for use in told[0].experts) == pool_stage.chosen.size
    assert pool_stage.feed.take_earlier() == ()


def test_what_is_known_is_computed_before_the_answer_comes(pool_stage: PoolStage) -> None:
    """The rest of the layer is asked for, and layers before it are told with that."""
    first, *others = pool_stage.used
    pool_stage.link.answer = lambda need: [lasting(pool_stage, pool_stage.used)]
    pool_stage.run()
    pool_stage.run()  # known
    pool_stage.feed.note(Evicted(((LAYER, first), (LAYER + 1, others[0]))))
    pool_stage.link.answer = lambda need: [lasting(pool_stage, [first])]
    assert pool_stage.run() == pool_stage.expected
    asked = needs_of(pool_stage)[-1]
    assert [use.expert for use in asked.experts] == pool_stage.used
    assert asked.known == tuple(others)
    assert [known.layer for known in asked.earlier] == [LAYER]
    slots = sorted(lease.slot for lease in pool_stage.feed.take_released())
    assert slots == pool_stage.used  # also what was known is given back
    assert pool_stage.run() == pool_stage.expected
    assert len(needs_of(pool_stage)) == 2


@pytest.mark.parametrize("how", ["evicted", "written over", "stands", "not lasting"])
def test_what_does_not_last_any_more_is_asked_for(pool_stage: PoolStage, how: str) -> None:
    expert = pool_stage.used[0]
    granted = lasting(pool_stage, pool_stage.used)
    plain = granted._replace(lasting=False)
    pool_stage.link.answer = lambda need: [plain if how == "not lasting" else granted]
    pool_stage.run()
    if how == "evicted":
        pool_stage.feed.note(Evicted(((LAYER, expert),)))
    elif how == "written over":
        pool_stage.pool.write_header(expert, 4, LAYER, expert, 1)
    elif how == "stands":  # and then does not: one of them is lost
        pool_stage.pool.write_header(expert, 4, LAYER, expert, 1)
        every = list(range(len(pool_stage.pool.windows)))
        pool_stage.feed.note(pool_stage.grant(every, standing=True))
    known = {"evicted": pool_stage.used[1:], "written over": pool_stage.used[1:]}.get(how, [])

    def answer(need: Need) -> list[Any]:
        pool_stage.pool.write_header(expert, 3, LAYER, expert, 1)
        return [lasting(pool_stage, pool_stage.used)]

    pool_stage.link.answer = answer
    assert pool_stage.run() == pool_stage.expected
    assert list(needs_of(pool_stage)[-1].known) == known
    assert len(needs_of(pool_stage)) == 2


def test_known_slots_are_given_back_to_who_waits_for_nothing_else(pool_stage: PoolStage) -> None:
    """All of the pool may be in use by what is known: then the first grant names nothing."""
    *known, last = pool_stage.used
    pool_stage.link.answer = lambda need: [lasting(pool_stage, pool_stage.used)]
    pool_stage.run()
    pool_stage.feed.note(Evicted(((LAYER, last),)))
    pool_stage.feed.take_released()

    def send(message: object) -> None:
        pool_stage.link.sent.append(message)
        if isinstance(message, Need):
            pool_stage.link.inbox.append(pool_stage.grant([], n_waiting=1))
        elif isinstance(message, Release):
            pool_stage.link.inbox.append(pool_stage.grant([last]))

    pool_stage.link.send = send  # type: ignore[method-assign]
    assert pool_stage.run() == pool_stage.expected
    (release,) = [m for m in pool_stage.link.sent if isinstance(m, Release)]
    assert [lease.slot for lease in release.released] == known


# The core


def known(layer: int, experts: list[int]) -> KnownLayer:
    return KnownLayer(layer, need(layer, experts).experts)


def told_of(actions: list[Any]) -> list[Any]:
    return [action.message for action in actions if isinstance(action, ToCompute)]


def test_a_grant_names_what_is_not_known(residents: Engine) -> None:
    asked = need(0, [0, 1, 5])._replace(known=(0,))
    (grant,) = told_of(residents.handle(FromCompute(asked)))
    assert grant.evicted == ((1, 0),)
    assert [location.expert for location in grant.locations] == [1]
    assert [location.expert for location in grant.on_the_way] == [5]
    assert grant.lasting


@pytest.fixture
def residents() -> Engine:
    """Two layers, each with four of its experts, in eight slots; expert 0 of layer 1 goes first."""
    run = engine(2, 8, 8, lasting_grants=True)
    held: tuple[Any, ...] = ()
    for layer in (1, 0):
        _, held = run.run_layer(need(layer, [0, 1, 2, 3], held))
    run.handle(FromCompute(need(0, [0, 1, 2, 3], held)))
    run.inbox.clear()
    residency = run.core.residency
    residency.slots.unpin_all()
    return run


def test_layers_told_later_count_like_needs() -> None:
    plain, late = (engine(2, 8, 6, lasting_grants=True) for _ in range(2))
    for run in (plain, late):
        run.run_layer(need(0, [0, 1, 2]))
        run.run_layer(need(1, [0, 1, 2]))
    plain.run_layer(need(0, [0]))
    plain.run_layer(need(1, [1]))
    plain.handle(FromCompute(need(0, [5, 6])))
    asked = need(0, [5, 6])._replace(earlier=(known(0, [0]), known(1, [1])))
    late.handle(FromCompute(asked))
    one, other = plain.core.residency, late.core.residency
    assert (one.n_needs, one.uses) == (other.n_needs, other.uses)
    for name in ("requests", "hits", "misses", "evictions"):
        assert getattr(one.counters, name) == getattr(other.counters, name), name
    assert [s.key for s in one.slots.slots] == [s.key for s in other.slots.slots]


def test_a_step_that_needed_no_grant_counts_when_it_ends(residents: Engine) -> None:
    before = residents.core.residency.counters.hits
    heard: list[Need] = []
    residents.core._on_need = heard.append
    residents.core.requests.handle_done = lambda message: []  # type: ignore[method-assign]
    ended = dataclasses.replace(done(9), earlier=(known(0, [0, 1]), known(1, [2])))
    residents.handle(FromCompute(ended))
    assert residents.core.residency.counters.hits == before + 3
    assert [(need.step, need.layer) for need in heard] == [(9, 0), (9, 1)]


def test_in_waves_nothing_lasts() -> None:
    run = engine(1, 8, 2, lasting_grants=True)
    (grant,) = told_of(run.handle(FromCompute(need(0, [0, 1, 2]))))
    assert grant.n_waiting == 1
    assert not grant.lasting
    assert {(0, 0), (0, 1), (0, 2)} <= set(grant.evicted)


def test_a_pool_that_shrinks_in_a_step_waits_for_one_who_waits(residents: Engine) -> None:
    """Compute may be using any of them; when it asks, it uses those it asks for."""
    residency = residents.core.residency
    assert residency.resize((6,), is_stepping=True) == []
    asked = need(0, [0, 1, 2, 3, 4])._replace(known=(0, 1, 2, 3))
    actions = residents.handle(FromCompute(asked))
    punched = [action for action in actions if isinstance(action, PunchSlots)]
    (grant,) = told_of(actions)
    assert len(punched[0].slots) == 2
    assert {key[0] for key in grant.evicted} == {1}
    assert len(grant.evicted) == 3
    assert [location.expert for location in grant.on_the_way] == [4]


def test_a_pool_that_shrinks_between_steps_tells_first(residents: Engine) -> None:
    actions = residents.handle(PoolTarget((6,)))
    assert isinstance(told_of(actions)[0], Evicted)
    assert isinstance(actions[0], ToCompute)
    assert any(isinstance(action, PunchSlots) for action in actions)


def test_what_cannot_be_read_again_does_not_last(residents: Engine) -> None:
    slot = residents.core.residency.slots.find((1, 2))
    assert slot is not None
    residents.handle(FromCompute(SlotsLost(1, (slot.lease,))))
    (name,) = [name for name, reads in residents.under_way.items() if reads]
    lease = residents.under_way[name].pop().lease
    actions = residents.handle(FromReader(name, ReadFailed(lease, 5, "EIO", False)))
    assert Evicted(((1, 2),)) in told_of(actions)


def test_what_is_used_and_gone_ends_its_step(residents: Engine) -> None:
    """Compute had an expert of a reader that died since, and asked before it heard that nobody can
    read it again: nothing comes into its slot while compute may be looking at it."""
    slot = residents.core.residency.slots.find((0, 2))
    assert slot is not None
    residents.handle(FromCompute(SlotsLost(1, (slot.lease,))))
    (name,) = [name for name, reads in residents.under_way.items() if reads]
    lease = residents.under_way[name].pop().lease
    residents.handle(FromReader(name, ReadFailed(lease, 5, "EIO", False)))
    crossing = need(0, [2, 6])._replace(known=(2,))
    failures: list[str] = []
    residents.core.requests.fail_step = failures.append  # type: ignore[method-assign]
    actions = residents.handle(FromCompute(crossing))
    assert actions == [ToCompute(Abort(crossing.step))]
    assert "could not be read again" in failures[0]
    assert not any(residents.under_way.values())
    residents.core.residency.abort_layer()
    residents.inbox.clear()
    residents.run_layer(need(0, [2, 6]))


def test_what_cannot_be_read_again_ends_the_step_that_may_use_it(residents: Engine) -> None:
    """A pool that grows may have another expert in its slot before compute hears of that."""
    slot = residents.core.residency.slots.find((1, 2))
    assert slot is not None
    residents.handle(FromCompute(SlotsLost(1, (slot.lease,))))
    (name,) = [name for name, reads in residents.under_way.items() if reads]
    lease = residents.under_way[name].pop().lease
    residents.core.requests._step = Step(7, (), 0, 2)
    failed = FromReader(name, ReadFailed(lease, 5, "EIO", False))
    told = told_of(residents.handle(failed))
    assert told == [Evicted(((1, 2),)), Abort(7)]
    assert residents.core.requests._failure is not None
    assert told_of(residents.handle(failed)) == []  # twice


@pytest.mark.parametrize("settings", [{"whole_layers": True}, {}])
def test_where_experts_may_go_at_any_time_no_grant_lasts(settings: dict[str, Any]) -> None:
    run = engine(2, 8, 4, lasting_grants=bool(settings), **settings)
    for layer in (0, 1):
        grants = told_of(run.handle(FromCompute(need(layer, [0, 1, 2]))))
        assert [type(grant) for grant in grants] == [Grant]
        assert not grants[0].lasting
        run.complete_all_reads()


@pytest.mark.parametrize("seed", range(8))
def test_hits_are_those_of_a_replay(seed: int) -> None:
    """Whoever knows an expert has to know what the core would have granted, no more and no less."""
    rng = random.Random(seed)
    n_layers, n_experts, n_slots = 3, 8, rng.randint(8, 20)
    run = engine(
        n_layers,
        n_experts,
        n_slots,
        policy=Lfu(policy_geometry(n_layers, n_slots), None, 2),
        lasting_grants=True,
        seed=seed,
        notice_probability=0.5,
    )
    needs = [
        need(layer, rng.sample(range(n_experts), 2))._replace(step=step)
        for step in range(40)
        for layer in range(n_layers)
    ]
    lasts: set[tuple[int, int]] = set()
    earlier: list[KnownLayer] = []
    held: tuple[Any, ...] = ()
    n_known = 0
    for each in needs:
        keys = [(each.layer, use.expert) for use in each.experts]
        mine = tuple(expert for layer, expert in keys if (layer, expert) in lasts)
        if len(mine) == len(keys):
            n_known += 1
            earlier.append(KnownLayer(each.layer, each.experts))
            continue
        asked = each._replace(released=held, known=mine, earlier=tuple(earlier))
        earlier = []
        _, held = run.run_layer(asked)
        lasts.difference_update(run.evicted)
        run.evicted.clear()
        lasts.update(keys)
    policy = Lfu(policy_geometry(n_layers, n_slots), None, 2)
    outcome = replay(needs, geometry(n_layers, n_experts, n_slots), policy)
    n_late = sum(len(each.experts) for each in earlier)
    assert n_known > 10
    assert run.core.residency.counters.hits + n_late == outcome.all.hits
