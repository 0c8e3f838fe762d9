"""Copies of experts in anonymous memory: right bytes, and memory that comes and goes."""

import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from read_cases import pool_of

from compute_worker import reference
from compute_worker.locked import refusal_to_lock
from compute_worker.memory_trial import MemoryTrial, try_memory
from compute_worker.own_memory import HUGE_PAGE_BYTES, OwnMemory
from compute_worker.regions import Regions
from coordinator.processes.accounting import private_bytes
from io_worker.slabs import ExpertTensor, LayerSlabs, SlabTable
from shm.messages import Location, SlotLease
from shm.pool import PoolMapping

LAYER, N_EXPERTS = 3, 6
SIZES = (1_000_000, 900_100, 1_100_028)  # gate, up, down: six experts are more than two huge pages


def tensor(n_bytes: int) -> ExpertTensor:
    return ExpertTensor(0, 0, n_bytes, 0, 1, n_bytes // 4)


SLABS = SlabTable(N_EXPERTS, (LayerSlabs(LAYER, *map(tensor, SIZES)),))


@pytest.fixture
def pool() -> Iterator[PoolMapping]:
    with pool_of(N_EXPERTS, *SIZES) as (mapping, _):
        mapping.view[:] = np.random.default_rng(0).bytes(len(mapping.view))
        yield mapping


def location(pool: PoolMapping, expert: int) -> Location:
    """The expert begins somewhere in its windows, in a slot that is not its own number."""
    gate, up, down = pool.windows[(expert + 2) % N_EXPERTS]
    return Location(expert, SlotLease(0, 1), 0, gate + 32, up + 64, down + 3)


def bytes_at(address: int, n_bytes: int) -> bytes:
    return ctypes.string_at(address, n_bytes)


@pytest.mark.parametrize("locks", [False, True])
def test_copies_are_what_lies_in_the_pool(pool: PoolMapping, locks: bool) -> None:
    own = OwnMemory(Regions(pool, None), SLABS, locks=locks)
    places = [location(pool, expert) for expert in range(N_EXPERTS)]
    found = own.adopt(LAYER, places[:4]) + own.adopt(LAYER, places[4:])
    pool_bytes = bytes(pool.view)
    pool.view[:] = bytes(len(pool.view))  # whatever becomes of the slots
    for place, addresses in zip(places, found, strict=True):
        for start, n_bytes, address in zip(
            (place.gate, place.up, place.down), SIZES, addresses, strict=True
        ):
            assert address % 64 == 0
            assert bytes_at(address, n_bytes) == pool_bytes[start : start + n_bytes]
    assert found[0][0] % HUGE_PAGE_BYTES == 0
    own.drop(LAYER)


def test_a_part_takes_little_more_than_its_bytes_and_dropped_nothing(pool: PoolMapping) -> None:
    own = OwnMemory(Regions(pool, None), SLABS, locks=False)
    before = private_bytes(os.getpid())
    own.adopt(LAYER, [location(pool, 0)])
    taken = private_bytes(os.getpid()) - before
    assert sum(SIZES) // 2 < taken < sum(SIZES) + 2 * HUGE_PAGE_BYTES
    own.adopt(LAYER, [location(pool, expert) for expert in range(1, N_EXPERTS)])
    taken = private_bytes(os.getpid()) - before
    assert taken < N_EXPERTS * sum(SIZES) + (1 << 20), "the end of a layer takes no huge page"
    own.drop(LAYER)
    assert private_bytes(os.getpid()) - before < 1 << 20
    own.drop(LAYER)  # has nothing


def rolled_up(field: str) -> int:
    """A sum over all mappings of this process, in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith(field)).split()[1])


@pytest.mark.parametrize("locks", [False, True])
def test_a_layer_lies_in_huge_pages_also_when_it_is_locked(pool: PoolMapping, locks: bool) -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("needs transparent huge pages")
    own = OwnMemory(Regions(pool, None), SLABS, locks=locks)
    before, locked = rolled_up("AnonHugePages"), rolled_up("Locked")
    for expert in range(N_EXPERTS):  # one by one, as parts of a layer come
        own.adopt(LAYER, [location(pool, expert)])
    n_huge = N_EXPERTS * sum(SIZES) // HUGE_PAGE_BYTES
    if rolled_up("AnonHugePages") == before:
        pytest.skip("no huge page is free")
    assert rolled_up("AnonHugePages") - before == n_huge * HUGE_PAGE_BYTES
    if locks and rolled_up("Locked") > locked:  # the limit allows it
        assert rolled_up("Locked") - locked >= N_EXPERTS * sum(SIZES)
    own.drop(LAYER)
    assert rolled_up("Locked") == locked


def test_a_layer_may_be_adopted_again(pool: PoolMapping) -> None:
    own = OwnMemory(Regions(pool, None), SLABS, locks=False)
    own.adopt(LAYER, [location(pool, 1)])
    own.drop(LAYER)
    pool.view[:] = bytes([7]) * len(pool.view)
    ((gate, _, _),) = own.adopt(LAYER, [location(pool, 1)])
    assert bytes_at(gate, SIZES[0]) == bytes([7]) * SIZES[0]
    own.drop(LAYER)


def test_no_memory_is_an_error_of_the_system(pool: PoolMapping) -> None:
    own = OwnMemory(Regions(pool, None), SLABS, locks=False)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError):
            own.adopt(LAYER, [location(pool, 0)])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert own.adopt(LAYER, [location(pool, 0)])
    own.drop(LAYER)


def test_a_refusal_to_lock_has_the_figures() -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, before[1]))
    try:
        assert refusal_to_lock(1 << 20) == ""
        text = refusal_to_lock(3 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    if text:  # root may lock anything
        assert str((3 << 20) - (1 << 20)) in text


@pytest.mark.parametrize(
    ("own_rate", "n_tokens", "pays"),
    [
        (104.9, None, False),  # less than five per cent
        (105.1, None, True),
        (50.0, None, False),
        (200.0, 199, False),  # a token gains 0.05 s, the move takes 10 s
        (200.0, 201, True),
        (100.0, 10**9, False),
    ],
)
def test_the_move_pays(own_rate: float, n_tokens: int | None, pays: bool) -> None:
    trial = MemoryTrial(100.0, own_rate, move_rate=10.0)
    assert trial.pays(expert_bytes=100, token_bytes=10, n_tokens=n_tokens) is pays


def test_the_trial_reads_both_and_gives_back_what_it_took(pool: PoolMapping) -> None:
    before = private_bytes(os.getpid())
    trial = try_memory(pool.view, reference.read_all)
    assert min(trial.pool_rate, trial.own_rate, trial.move_rate) > 0
    assert private_bytes(os.getpid()) - before < 1 << 20
    assert "in the pool, moved at" in str(trial)
