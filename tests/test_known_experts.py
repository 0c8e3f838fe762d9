"""Layers whose experts are known go without a word: and nobody can tell from what is told, asked
and computed whether each was looked at by itself."""

import dataclasses
import random
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import tiny_model
from model_runner import ModelRunner
from read_cases import pool_of

from compute_worker.feed import ExpertFeed
from compute_worker.forward import embed, forward
from compute_worker.kernels import LayerRun
from compute_worker.known_experts import KnownExperts, may_be_used
from compute_worker.own_memory import OwnMemory
from compute_worker.regions import Regions
from shm.messages import Adopt, Evicted, Grant, Location, Need, Revoke, SlotLease
from shm.pool import PoolMapping

N_LAYERS, N_EXPERTS, N_ACTIVE = 4, 8, 2
TOKENS = np.random.default_rng(5).integers(0, 300, 40).tolist()


class Coordinator:
    """All experts lie in the pool, expert e of layer l in slot ``l * N_EXPERTS + e``. Grants what
    is asked for, mostly for longer; some of what it granted is evicted before."""

    def __init__(self, pool: PoolMapping, seed: int) -> None:
        self.pool = pool
        self.sent: list[Any] = []
        self.lasting_chance = 0.9
        self._inbox: deque[Any] = deque()
        self._random = random.Random(seed)

    def location(self, layer: int, expert: int) -> Location:
        slot = layer * N_EXPERTS + expert
        return Location(expert, SlotLease(slot, 3), 0, *self.pool.windows[slot])

    def standing(self, layer: int) -> Grant:
        every = tuple(self.location(layer, expert) for expert in range(N_EXPERTS))
        return Grant(layer, every, (), 0, True)

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if not isinstance(message, Need):
            return
        layer = message.layer
        self._inbox.append(Evicted(tuple(self._some_key(layer) for _ in range(2))))
        asked = [use.expert for use in message.experts if use.expert not in message.known]
        for expert in asked:  # what was written over is read again
            self.write_header(layer, expert, 3)
        there = tuple(self.location(layer, expert) for expert in asked)
        lasts = self._random.random() < self.lasting_chance
        self._inbox.append(Grant(layer, there, (), 0, False, message.step, (), lasts))

    def write_header(self, layer: int, expert: int, generation: int) -> None:
        self.pool.write_header(layer * N_EXPERTS + expert, generation, layer, expert, 1)

    def _some_key(self, not_of: int) -> tuple[int, int]:
        others = [layer for layer in range(N_LAYERS) if layer != not_of]
        return self._random.choice(others), self._random.randrange(N_EXPERTS)

    def receive(self) -> Any:
        return self._inbox.popleft()

    def poll(self) -> Any | None:
        return self._inbox.popleft() if self._inbox else None


class Stage:
    """One model, and feeds of the same seed over pools of their own."""

    def __init__(self, model: Path, stack: ExitStack) -> None:
        self.runner = ModelRunner(model)
        self._file = model.read_bytes()
        self._stack = stack

    def feed(self, seed: int) -> tuple[ExpertFeed, Coordinator]:
        runner, slabs = self.runner, self.runner.spec.slabs
        n_slots = N_LAYERS * N_EXPERTS
        made = pool_of(n_slots, *slabs.layers[0].range_bytes)
        coordinator = Coordinator(self._stack.enter_context(made)[0], seed)
        pool = coordinator.pool
        for layer, own in enumerate(slabs.layers):
            for expert in range(N_EXPERTS):
                windows = pool.windows[layer * N_EXPERTS + expert]
                for part, start in zip(own.ranges(expert), windows, strict=True):
                    content = self._file[part.offset : part.offset + part.n_bytes]
                    pool.view[start : start + part.n_bytes] = content
                coordinator.write_header(layer, expert, 3)
        regions = Regions(pool, None)
        own_memory = OwnMemory(regions, slabs, locks=False)
        given = (slabs, N_ACTIVE, runner.kernels, own_memory)
        return ExpertFeed(coordinator, regions, *given), coordinator


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    options = {"n_layers": N_LAYERS, "n_experts": N_EXPERTS, "n_active": N_ACTIVE}
    model = tiny_model(tmp_path / "tiny.gguf", **options)
    with ExitStack() as stack:
        made = Stage(model, stack)
        yield made
        made.runner.close()


@pytest.mark.parametrize("n_standing", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_known_is_told_as_if_each_layer_had_been_looked_at(
    stage: Stage, seed: int, n_standing: int
) -> None:
    """In every third step something wrote over a header: who comes to the expert must notice."""
    runner, rng = stage.runner, random.Random(seed)
    feeds = [stage.feed(seed) for _ in range(2)]
    tables = [runner.new_table(len(TOKENS)) for _ in feeds]
    lengths: list[int] = []

    def counted(*given: Any) -> LayerRun:
        run = runner.kernels.known_layers(*given)
        lengths.append(len(run.layers))
        return run

    kernels = dataclasses.replace(runner.kernels, known_layers=counted)
    layers = rng.sample(range(N_LAYERS), N_LAYERS)
    standing, others = layers[:n_standing], layers[n_standing:]
    for feed, coordinator in feeds:
        for layer in standing:
            feed.note(coordinator.standing(layer))
    start = 0
    for step in range(14):
        tokens = TOKENS[start : start + rng.choice([1, 1, 1, 2, 5])]
        recent = None if rng.random() < 0.7 else np.arange(len(tokens)) > 0
        broken = (rng.choice(others), rng.randrange(N_EXPERTS))
        outcomes = []
        for (feed, coordinator), table, goes_on in zip(feeds, tables, (True, False), strict=True):
            looked: list[int] = []  # before these layers
            n_sent = len(coordinator.sent)
            feed.begin_step(step, recent)
            coordinator.write_header(*broken, 4 if step % 3 == 2 else 3)
            batch = runner.batch((tokens, start, table))
            hidden = embed(runner.weights, batch).astype(np.float32)
            given = (batch, hidden, range(N_LAYERS), runner.kv, feed, feed if goes_on else None)
            hidden = forward(runner.weights, *given, kernels, before=looked.append)
            asked = [m.layer for m in coordinator.sent[n_sent:] if isinstance(m, Need)]
            after = [0, *[layer + 1 for layer in asked if layer + 1 < N_LAYERS]]
            assert looked == (after if goes_on else list(range(N_LAYERS)))
            feed.end_step(early=False)
            coordinator.write_header(*broken, 3)
            told = (feed.standing_uses, feed.take_earlier(), feed.take_released())
            outcomes.append((hidden.tobytes(), told, list(coordinator.sent)))
        assert outcomes[0] == outcomes[1], step
        start += len(tokens)
    assert max(lengths) > 1 and 0 in lengths


def known_in(feed: ExpertFeed, layer: int) -> list[int]:
    return [expert for expert in range(N_EXPERTS) if may_be_used(feed.entries[layer, [expert]])]


def test_an_expert_is_known_as_long_as_it_may_be_used(stage: Stage) -> None:
    feed, coordinator = stage.feed(0)
    everything = list(range(N_EXPERTS))
    x = np.ones((1, stage.runner.spec.width), np.float32)
    chosen, shares = np.array([[2, 5]], np.int32), np.ones((1, N_ACTIVE), np.float32)
    feed.begin_step(1, None)
    coordinator.lasting_chance = 1.0
    feed(1, x, chosen, shares)
    assert known_in(feed, 1) == [2, 5] and not any(known_in(feed, layer) for layer in (0, 2, 3))
    coordinator.write_header(1, 5, 4)
    assert known_in(feed, 1) == [2]
    feed(1, x, chosen, shares)
    feed.note(Evicted(((1, 2), (1, 3), (0, 2))))
    assert known_in(feed, 1) == [5]
    coordinator.write_header(1, 4, 4)
    feed.note(coordinator.standing(1))
    assert known_in(feed, 1) == [], "it does not stand, and nothing of it is known any more"
    coordinator.write_header(1, 4, 3)
    feed.note(coordinator.standing(1))
    feed.note(Evicted(((1, 5),)))
    assert known_in(feed, 1) == everything
    coordinator.write_header(1, 5, 4)
    assert known_in(feed, 1) == everything, "looked at when it was granted"
    before = feed.entries[1].copy()
    feed.note(Adopt(1, (coordinator.location(1, 4),)))
    assert known_in(feed, 1) == everything
    assert np.flatnonzero((feed.entries[1] != before).any(axis=1)).tolist() == [4]
    feed.note(Revoke((1, 2)))
    assert known_in(feed, 1) == []


def test_what_is_added_without_marks_has_none() -> None:
    known, mark = KnownExperts(2, 3), np.array([1, 2], np.uint64)
    marked = np.array([[10, 20, 30, mark.ctypes.data, 1, 9]], np.uint64)
    known.add(1, [2], marked)
    assert not may_be_used(known.entries[1, [2]])
    known.add(1, [2], marked[:, :3])
    assert may_be_used(known.entries[1, [2]])
    assert known.addresses(1, [2]).tolist() == [[10, 20, 30]]
    assert not known.entries[0].any() and not known.entries[1, :2].any()
