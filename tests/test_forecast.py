"""Expected speeds, and the advice that follows from them."""

import dataclasses
from pathlib import Path

import pytest
from gguf_builder import tiny_model
from hypothesis import given
from hypothesis import strategies as st

from compute_worker.arch import ModelSpec, dense_bytes, resolve
from coordinator.command.config import Config
from coordinator.core.slot_classes import smallest_pool_bytes
from coordinator.plan.advice import EVERYTHING_STAYS, advice, bits_per_weight
from coordinator.plan.budget import MemoryPlan, plan_memory
from coordinator.plan.expected_pool import expected_pool
from coordinator.plan.forecast import (
    CONCENTRATED,
    EVEN,
    MESSAGE_SECONDS,
    START_SECONDS,
    ComputeTimes,
    Forecast,
    Measured,
    Pool,
    Profile,
    Shape,
    burst_seconds,
    forecast,
    forecasts,
    hit_rate,
    prompt_seconds,
    start_seconds,
)
from coordinator.plan.memory_request import MemoryRequest
from coordinator.processes.available_memory import AvailableMemory
from io_worker.model_file import open_model
from shm.pool import PoolLayout, SlotClass

MiB = 1 << 20
OLMOE = Shape(n_layers=16, n_experts=64, n_active=8, slab_bytes=3_800_000, dense_bytes=253_000_000)
QWEN3 = Shape(n_layers=48, n_experts=128, n_active=8, slab_bytes=2_850_000, dense_bytes=10**9)
# 1.6 GB/s; 40 ms of everything but experts, 0.3 ms each
FAST = Measured(
    {1: 0.0024, 2: 0.0048, 4: 0.0095, 8: 0.019},
    ComputeTimes(1, 0.016, 0.0003),
    ComputeTimes(128, 0.5, 0.002),
)
POOL = Pool(n_slots=384, chunk_tokens=512, prompt_tokens=100)


def with_slots(n_slots: int) -> Pool:
    return dataclasses.replace(POOL, n_slots=n_slots)


def of_profile(n_slots: int, profile: Profile) -> Forecast:
    hits = hit_rate(profile, n_slots / OLMOE.n_layers, OLMOE)
    return forecast(OLMOE, FAST, with_slots(n_slots), hits)


@pytest.mark.parametrize(
    ("shape", "slots_per_layer", "published"),
    [
        (OLMOE, 8, 0.28),
        (OLMOE, 24, 0.68),
        (QWEN3, 1.9 * 8, 0.54),
        (QWEN3, 3.8 * 8, 0.78),
    ],
)
def test_the_profiles_lie_around_public_measurements(
    shape: Shape, slots_per_layer: float, published: float
) -> None:
    low, high = (hit_rate(profile, slots_per_layer, shape) for profile in (EVEN, CONCENTRATED))
    assert low <= published <= high + 0.01


def test_everything_there_is_the_speed_of_the_cores() -> None:
    found = of_profile(1024, EVEN)
    assert found.hit_rate == 1
    assert found.missed_bytes == 0
    assert found.tokens_per_second == pytest.approx(1 / (0.016 + 128 * 0.0003))
    assert not found.is_disk_bound


def test_nothing_there_is_the_speed_of_the_disk() -> None:
    found = of_profile(0, CONCENTRATED)
    burst_and_last = 16 * (0.019 + 0.0003)
    assert found.tokens_per_second == pytest.approx(
        1 / (0.016 + 16 * MESSAGE_SECONDS + burst_and_last)
    )
    assert found.missed_bytes == 16 * 8 * OLMOE.slab_bytes
    assert found.is_disk_bound


@given(n_slots=st.integers(0, 1023), more=st.integers(1, 400))
def test_more_slots_are_never_slower(n_slots: int, more: int) -> None:
    for profile in (EVEN, CONCENTRATED):
        small = of_profile(n_slots, profile)
        large = of_profile(min(1024, n_slots + more), profile)
        assert large.hit_rate >= small.hit_rate
        assert large.tokens_per_second >= small.tokens_per_second * (1 - 1e-9)
        assert 0 <= small.hit_rate <= 1


def test_bursts_between_and_beyond_the_measured_ones() -> None:
    assert burst_seconds(FAST, 0) == 0
    assert burst_seconds(FAST, 3) == pytest.approx((0.0048 + 0.0095) / 2)
    assert burst_seconds(FAST, 64) == pytest.approx(8 * 0.019)


def test_a_prompt_reads_each_expert_once_per_chunk() -> None:
    slow = dataclasses.replace(FAST, burst_seconds={1: 1.0, 8: 8.0})
    cold = dataclasses.replace(POOL, n_slots=0, prompt_tokens=2000, chunk_tokens=2000)
    assert prompt_seconds(OLMOE, slow, cold) == pytest.approx(16 * 64, rel=0.05)
    chunks = dataclasses.replace(cold, chunk_tokens=500)
    assert prompt_seconds(OLMOE, slow, chunks) == pytest.approx(4 * 16 * 64, rel=0.05)
    half = dataclasses.replace(chunks, n_slots=512)
    assert prompt_seconds(OLMOE, slow, half) == pytest.approx(2.5 * 16 * 64, rel=0.05)
    resident = dataclasses.replace(cold, n_slots=1024)
    assert prompt_seconds(OLMOE, slow, resident) < 100


def test_where_everything_fits_the_start_reads_everything() -> None:
    streams = start_seconds(OLMOE, FAST, preloads=False)
    assert streams == pytest.approx(START_SECONDS + 253 / 3.8 * 0.0024)
    preloads = start_seconds(OLMOE, FAST, preloads=True)
    assert preloads - streams == pytest.approx(16 * 64 / 8 * 0.019), "in bursts"


def test_dense_weights_that_the_page_cache_loses_are_read_by_every_token() -> None:
    holds = dataclasses.replace(POOL, mapped_bytes=1_900_000_000)
    loses = dataclasses.replace(holds, lost_bytes=380_000_000)
    before, after = (forecast(OLMOE, FAST, pool, 0.5) for pool in (holds, loses))
    assert after.missed_bytes == before.missed_bytes + loses.lost_bytes
    seconds = 100 * 0.0024
    assert 1 / after.tokens_per_second == pytest.approx(1 / before.tokens_per_second + seconds)
    cold = before.first_token_seconds - prompt_seconds(OLMOE, FAST, POOL)
    assert cold == pytest.approx(500 * 0.0024)
    chunks = dataclasses.replace(loses, prompt_tokens=2 * POOL.chunk_tokens)
    kept = dataclasses.replace(chunks, lost_bytes=0)
    more = prompt_seconds(OLMOE, FAST, chunks) - prompt_seconds(OLMOE, FAST, kept)
    assert more == pytest.approx(seconds), "the first chunk reads them anyway"


@pytest.mark.parametrize(
    ("policy", "n_layers_below", "expected"),
    [("lfu", 2, 1.0), ("lru", 0, 1.0), ("lru", 1, 0.5), ("lru", 2, 0.0)],
)
def test_a_plain_lru_does_not_hit_below_the_token_cycle(
    spec: ModelSpec, policy: str, n_layers_below: int, expected: float
) -> None:
    plan = plan_of(spec, 8 << 30)
    sizes = [spec.n_active - (index < n_layers_below) for index in range(2)]
    classes = tuple(SlotClass(n_slots, (4096, 4096, 4096)) for n_slots in sizes)
    plan = dataclasses.replace(plan, layout=PoolLayout(classes), class_of_layer=(0, 1))
    assert (plan.warning() is None) == (n_layers_below == 0)
    pool = expected_pool(Config(policy=policy), plan, spec, 0, 100)
    assert pool.hit_share == expected
    best = max(each.hit_rate for each in forecasts(OLMOE, FAST, pool).values())
    whole = dataclasses.replace(pool, hit_share=1.0)
    assert best == expected * max(e.hit_rate for e in forecasts(OLMOE, FAST, whole).values())


def test_what_the_page_cache_has_of_weights_that_are_mapped(spec: ModelSpec) -> None:
    request = MemoryRequest(8 << 30, None, 512, 64, "f16", 1, 4, maps_dense=True)
    plan = plan_memory(request, spec, AvailableMemory(64 << 30, "MemAvailable"))
    mapped = dense_bytes(spec) - plan.dense_bytes
    assert mapped > 0
    slab_bytes = spec.slabs.total_bytes // plan.n_experts
    for spare, lost in ((0, mapped), (mapped // 4, mapped - mapped // 4), (mapped, 0)):
        pool = expected_pool(Config(), plan, spec, spare, 100)
        assert (pool.mapped_bytes, pool.lost_bytes) == (mapped, lost)
        assert pool.n_slots == plan.layout.n_slots
    spare = mapped + 3 * slab_bytes
    assert expected_pool(Config(reader="mmap"), plan, spec, spare, 100).n_slots == 3
    anonymous = expected_pool(Config(), plan_of(spec, 8 << 30), spec, 0, 100)
    assert (anonymous.mapped_bytes, anonymous.lost_bytes) == (0, 0)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tiny_model(tmp_path_factory.mktemp("forecast") / "m.gguf", quantisation="Q8_0")
    found = resolve(open_model(path))
    layers = tuple(
        dataclasses.replace(
            layer,
            **{
                name: dataclasses.replace(
                    getattr(layer, name),
                    bytes_per_expert=getattr(layer, name).bytes_per_expert * 1000,
                )
                for name in ("gate", "up", "down")
            },
        )
        for layer in found.slabs.layers
    )
    slabs = dataclasses.replace(found.slabs, layers=layers)
    return dataclasses.replace(found, slabs=slabs, expert_width=found.expert_width * 1000)


def plan_of(spec: ModelSpec, memory_bytes: int) -> MemoryPlan:
    request = MemoryRequest(memory_bytes, None, 512, 64, "f16", 1, 4)
    return plan_memory(request, spec, AvailableMemory(64 << 30, "MemAvailable"))


def lines(spec: ModelSpec, memory_bytes: int, available: int, **changes: object) -> list[str]:
    plan = plan_of(spec, memory_bytes)
    forecasts = {"even": of_profile(100, EVEN)}
    config = dataclasses.replace(Config(), **changes)  # type: ignore[arg-type]
    return list(advice(config, plan, spec, available, forecasts))


def test_advice(spec: ModelSpec) -> None:
    whole = plan_of(spec, 8 << 30)
    assert whole.everything_fits
    everything = whole.total_bytes + 4 * MiB
    assert lines(spec, 8 << 30, 8 << 30) == [EVERYTHING_STAYS]
    # a tenth is missing: a file with fewer bits would do
    short = everything - whole.pool_bytes // 10
    found = lines(spec, short, short)
    assert any("such as Q6_K) would fit whole; this one has 8.5" in line for line in found)
    assert any("the disk decides the speed" in line for line in found)
    # nearly nothing is there, and the machine has more
    rest = whole.total_bytes - whole.pool_bytes
    least = rest + smallest_pool_bytes(spec.slabs) + 2 * MiB
    found = lines(spec, least, 4 * least)
    assert "smaller than what one token uses" in found[0]
    assert "more memory is free" in found[1]
    assert "no usual quantisation of this model would fit whole: stream it" in found[-1]
    (line,) = lines(spec, short, short, reader="mmap")
    assert line.startswith("the page cache keeps the experts")


@pytest.mark.parametrize(("name", "bits"), [("Q8_0", 8.5), ("Q4_K", 4.5), ("IQ2_XXS", 2.0625)])
def test_bits_per_weight(name: str, bits: float) -> None:
    assert bits_per_weight(name) == bits


def test_offered_types_exist_and_descend(tmp_path: Path) -> None:
    from_most = [bits_per_weight(name) for name in ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K")]
    assert from_most == sorted(from_most, reverse=True)
