"""What a reader tells compute counts before the core hears of it, once, whoever dies then."""

from simulation import SLAB_BYTES, engine, need

from coordinator.core.state import FromCompute, FromReader, ReaderDied, ReaderReady
from shm.messages import ReadSlabs, SlabsReady, SlotLease


def test_a_slab_that_compute_had_counts_as_read_before_its_reader_answers() -> None:
    run = engine(1, 8, 4, n_readers=1)
    actions = run.handle(FromCompute(need(0, [1, 2])))
    (reads,) = [action.message.reads for action in actions if isinstance(action.message, ReadSlabs)]
    used: tuple[SlotLease, ...] = tuple(read.lease for read in reads)
    run.core.residency.end_layer(used)
    counters = run.core.residency.counters
    assert (counters.reads, counters.bytes_read) == (2, 2 * SLAB_BYTES)
    assert run.core.residency.n_unanswered == 2
    answer = SlabsReady(used[0], 1, 2, SLAB_BYTES, 7, noticed=True)
    for _ in range(2):  # twice: the second one is nobody's
        run.handle(FromReader("io0", answer))
    assert (counters.reads, counters.bytes_read) == (2, 2 * SLAB_BYTES)
    assert (counters.bytes_over_read, counters.read_ns, counters.stale_answers) == (7, 1, 1)
    run.under_way["io0"] = []
    run.handle(ReaderDied("io0"))  # the other answer never comes
    run.handle(ReaderReady("io0", 2))
    assert run.core.residency.n_unanswered == 0
    assert (counters.reads, counters.bytes_read) == (2, 2 * SLAB_BYTES)
    assert run.under_way["io0"] == [], "nothing is read twice"
