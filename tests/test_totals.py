"""Totals of a run, from the messages and actions that a loop would bring."""

from dataclasses import dataclass, field

import pytest
import simulation
from simulation import SLAB_BYTES, need

from coordinator.core.actions import Action, Deliver, Ended, ToCompute, ToWorker
from coordinator.core.state import Event, FromCompute, FromReader
from coordinator.processes.totals import READ_BOUNDS_SECONDS, Histogram, Totals
from shm.messages import (
    ReadFailed,
    ReadSlabs,
    Ready,
    Sampled,
    Sampling,
    SlabRead,
    SlabsReady,
    Slice,
    SlotLease,
    Step,
    StepDone,
    StepTimes,
    Submit,
)

MS = 1_000_000
LEASE = SlotLease(3, 7)
OTHER_LEASE = SlotLease(3, 8)


def read(layer: int, lease: SlotLease = LEASE) -> ToWorker:
    return ToWorker("io0", ReadSlabs((SlabRead(lease, layer, 5, ()),)))


def submit(request: int, n_prompt: int) -> ToCompute:
    sampling = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0)
    return ToCompute(Submit(request, (1,) * n_prompt, sampling, 512, False))


def step(number: int, *slices: Slice, layers: tuple[int, int] = (0, 8)) -> ToCompute:
    return ToCompute(Step(number, slices, *layers))


def done(number: int, *, cancelled: bool = False, standing_uses: int = 0) -> StepDone:
    return StepDone(number, (), StepTimes(60, 30, 20, 10, 0, 0), standing_uses, (), cancelled)


@pytest.mark.parametrize(
    ("duration_ns", "place"),
    [
        (0, 0),
        (100_000, 0),  # a bound belongs below itself
        (100_001, 1),
        (5_000_000_000, len(READ_BOUNDS_SECONDS) - 1),
        (5_000_000_001, len(READ_BOUNDS_SECONDS)),
    ],
)
def test_histogram_places(duration_ns: int, place: int) -> None:
    histogram = Histogram()
    histogram.observe(duration_ns)
    histogram.observe(duration_ns)
    assert [at for at, count in enumerate(histogram.counts) if count] == [place]
    assert histogram.counts[place] == 2
    assert histogram.sum_ns == 2 * duration_ns


def test_a_read_for_a_layer_waits_from_the_layers_need() -> None:
    totals = Totals(["io0"])
    totals.received("compute", need(4, [5]), 10 * MS)
    totals.performed(read(4), 30 * MS)  # it stood in the coordinator's queue
    totals.received("io0", SlabsReady(LEASE, 40 * MS, 43 * MS, 900, 100), 44 * MS)
    reader = totals.readers["io0"]
    assert (reader.wait.sum_ns, reader.latency.sum_ns) == (30 * MS, 3 * MS)
    assert (reader.bytes_read, reader.bytes_over_read) == (900, 100)
    assert not reader.wanted_ns


def test_a_read_for_no_layer_waits_from_its_order() -> None:
    totals = Totals(["io0"])
    totals.received("compute", need(4, [5]), 10 * MS)
    totals.performed(read(6), 30 * MS)
    totals.received("io0", SlabsReady(LEASE, 40 * MS, 43 * MS, 900, 100), 44 * MS)
    assert totals.readers["io0"].wait.sum_ns == 10 * MS


def test_answers_that_nobody_waits_for_are_not_counted() -> None:
    totals = Totals(["io0"])
    totals.performed(read(6), 0)
    totals.received("io0", SlabsReady(OTHER_LEASE, 1, 2, 900, 100), 3)
    totals.received("io0", SlabsReady(LEASE, 1, 2, 900, 100), 3)
    totals.received("io0", SlabsReady(LEASE, 1, 2, 900, 100), 3)
    totals.received("io0", ReadFailed(LEASE, 5, "", False), 3)
    totals.received("stranger", SlabsReady(LEASE, 1, 2, 900, 100), 3)
    assert totals.readers["io0"].bytes_read == 900
    assert totals.readers["io0"].reads_failed == 0


def test_a_new_life_keeps_totals_and_owes_nothing() -> None:
    totals = Totals(["io0"])
    totals.performed(read(6), 0)
    totals.received("io0", SlabsReady(LEASE, 1, 2, 900, 100), 3)
    totals.performed(read(6, OTHER_LEASE), 4)
    totals.received("io0", Ready("io0", "{}"), 5)
    assert totals.readers["io0"].bytes_read == 900
    assert not totals.readers["io0"].wanted_ns


def test_a_failed_read_counts_as_failed_only() -> None:
    totals = Totals(["io0"])
    totals.performed(read(6), 0)
    totals.received("io0", ReadFailed(LEASE, 5, "input/output error", False), 1)
    reader = totals.readers["io0"]
    assert (reader.reads_failed, sum(reader.latency.counts), reader.bytes_read) == (1, 0, 0)


# what the loop sees -> prompt tokens, steps of prompts, steps of decoding
STEPS: dict[str, tuple[list[object], tuple[int, int, int]]] = {
    "a prompt and two tokens": (
        [
            submit(1, 5), step(1, Slice(1, 0, 5, True)), done(1),
            step(2, Slice(1, 5, 1, True)), done(2), step(3, Slice(1, 6, 1, True)), done(3),
        ],
        (5, 1, 2),
    ),
    "a prompt of one token is a prompt": (
        [submit(1, 1), step(1, Slice(1, 0, 1, True)), done(1)], (1, 1, 0),
    ),
    "a chunk cut at layers counts its tokens once": (
        [
            submit(1, 64), step(1, Slice(1, 0, 64, False), layers=(0, 4)), done(1),
            step(2, Slice(1, 0, 64, True), layers=(4, 8)), done(2),
        ],
        (64, 2, 0),
    ),
    "a cancelled chunk computed nothing": (
        [submit(1, 64), step(1, Slice(1, 0, 64, True)), done(1, cancelled=True)], (0, 1, 0),
    ),
    "a step that died with compute is no step": (
        [
            submit(1, 5), step(1, Slice(1, 0, 5, True)), Ended(1, "error", "died"),
            submit(2, 3), step(2, Slice(2, 0, 3, True)), done(2),
        ],
        (3, 1, 0),
    ),
    "two answers share a step": (
        [
            submit(1, 1), submit(2, 1), step(1, Slice(1, 0, 1, True)), done(1),
            step(2, Slice(2, 0, 1, True)), done(2),
            step(3, Slice(1, 1, 1, True), Slice(2, 1, 1, True)), done(3),
        ],
        (2, 2, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    script, expected = STEPS[name]
    totals = Totals([])
    for item in script:
        if isinstance(item, StepDone):
            totals.received("compute", item, 0)
        else:
            assert isinstance(item, ToCompute | Ended)
            totals.performed(item, 0)
    prompt, decode = totals.phases["prompt"], totals.phases["decode"]
    assert (totals.prompt_tokens, prompt.steps, decode.steps) == expected
    for phase in (prompt, decode):
        parts = (phase.compute_ns, phase.wait_disk_ns, phase.coordination_ns)
        assert parts == (30 * phase.steps, 20 * phase.steps, 10 * phase.steps)


def test_requests_and_tokens() -> None:
    totals = Totals([])
    for request, reason in enumerate(["eos", "eos", "length", "stop", "cancelled", "error"]):
        totals.performed(submit(request, 4), 0)
        assert totals.n_running == 1
        totals.performed(Deliver((Sampled(request, 9, 0.0), Sampled(99, 9, 0.0))), 0)
        totals.performed(Ended(request, reason, None), 0)
        assert totals.n_running == 0
    assert totals.generated_tokens == 12
    assert totals.requests == {"eos": 2, "length": 1, "stop": 1, "cancelled": 1, "error": 1}


def test_standing_uses_are_added_up() -> None:
    totals = Totals([])
    for number in (1, 2):
        totals.performed(step(number, Slice(1, 0, 1, True)), 0)
        totals.received("compute", done(number, standing_uses=16), 0)
    assert totals.standing_uses == 32


@dataclass
class Counted(simulation.Engine):
    """A simulated engine that feeds totals as the loop does."""

    totals: Totals = field(default_factory=lambda: Totals(["io0", "io1"]))

    def handle(self, event: Event) -> list[Action]:
        """See `simulation.Engine`."""
        match event:
            case FromCompute(message):
                self.totals.received("compute", message, 0)
            case FromReader(name, message):
                self.totals.received(name, message, 0)
        actions = super().handle(event)
        for action in actions:
            self.totals.performed(action, 0)
        return actions


@pytest.mark.parametrize("seed", range(5))
def test_totals_of_readers_add_up_to_what_the_core_counts(seed: int) -> None:
    made = simulation.engine(4, 8, 9, seed=seed, n_readers=0)
    engine = Counted(made.core, made.rng)
    engine.start_readers(2)
    released: tuple[SlotLease, ...] = ()
    for turn in range(200):
        experts = engine.rng.sample(range(8), engine.rng.randint(1, 4))
        _, released = engine.run_layer(need(turn % 4, experts, released))
    counters, readers = engine.core.residency.counters, engine.totals.readers.values()
    assert counters.reads > 100
    assert sum(sum(reader.latency.counts) for reader in readers) == counters.reads
    assert sum(reader.bytes_read for reader in readers) == counters.reads * SLAB_BYTES
    assert all(reader.bytes_read for reader in readers)
    assert not any(reader.wanted_ns for reader in readers)
