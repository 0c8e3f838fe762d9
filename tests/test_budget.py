import dataclasses

import pytest
from gguf_builder import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_worker.arch import ModelSpec, dense_bytes, kv_block_bytes, resolve
from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import PoolSize
from coordinator.core.slot_classes import smallest_pool_bytes, whole_pool_bytes
from coordinator.plan.budget import SCRATCH_SHARE_OF_PROMPT, plan_memory, token_cycle_bytes
from coordinator.plan.footprint import scratch_bytes
from coordinator.plan.memory_request import MemoryRequest, OnlySequence
from coordinator.processes.available_memory import AvailableMemory
from coordinator.processes.limits import ResourceError
from io_worker.model_file import open_model
from io_worker.slabs import LayerSlabs

MiB = 1 << 20
AMPLE = AvailableMemory(64 << 30, "MemAvailable in /proc/meminfo")
DEFAULT = MemoryRequest(
    memory_bytes=None,
    pool=None,
    context_tokens=None,
    chunk_tokens=None,
    kv_type="f16",
    n_io_workers=1,
    n_threads=6,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tiny_model(tmp_path_factory.mktemp("budget") / "m.gguf", context_length=2048)
    return resolve(open_model(path))


def large(spec: ModelSpec) -> ModelSpec:
    """The tiny model with the expert bytes, layers and widths of OLMoE-1B-7B, Q4_K."""
    n_bytes = 1024 * 2048 // 256 * 144
    first = spec.slabs.layers[0]
    tensor = dataclasses.replace(first.gate, bytes_per_expert=n_bytes)
    layers = tuple(LayerSlabs(layer, tensor, tensor, tensor) for layer in range(16))
    return dataclasses.replace(
        spec,
        n_layers=16,
        width=2048,
        n_heads=16,
        n_kv_heads=16,
        head_width=128,
        n_experts=64,
        n_active=8,
        context_length=4096,
        vocabulary_size=50304,
        slabs=dataclasses.replace(spec.slabs, n_experts=64, layers=layers),
    )


def test_with_room_for_all_every_expert_stays(tiny: ModelSpec) -> None:
    plan = plan_memory(DEFAULT, tiny, AMPLE)
    assert plan.everything_fits
    assert plan.pool_bytes == whole_pool_bytes(tiny.slabs)
    assert plan.context_tokens == tiny.context_length
    assert plan.chunk_tokens == 2048
    assert plan.dense_bytes == dense_bytes(tiny)
    assert plan.warning() is None


def test_the_shipped_model_keeps_two_fifths(tiny: ModelSpec) -> None:
    request = dataclasses.replace(DEFAULT, is_shipped_model=True)
    plan = plan_memory(request, tiny, AMPLE)
    assert plan.layout.n_slots == int(0.4 * plan.n_experts)
    assert "for 6 of 16 experts (37 %)" in plan.describe()
    asked = dataclasses.replace(request, pool=PoolSize(share=1.0))
    assert plan_memory(asked, tiny, AMPLE).everything_fits


def test_the_default_budget_leaves_the_reserve(tiny: ModelSpec) -> None:
    plan = plan_memory(DEFAULT, tiny, AMPLE)
    assert plan.budget_bytes == AMPLE.n_bytes - AMPLE.reserve_bytes
    assert "MemAvailable in /proc/meminfo less 5.12 GiB" in plan.describe()


def test_parts_of_a_budget_that_does_not_hold_everything(tiny: ModelSpec) -> None:
    """OLMoE shapes in 1,200 MiB: a fifth for the context, a tenth for the chunk, the rest pool."""
    spec = large(tiny)
    plan = plan_memory(dataclasses.replace(DEFAULT, memory_bytes=1200 * MiB), spec, AMPLE)
    block = kv_block_bytes(spec, "f16")
    assert plan.kv_bytes == 240 * MiB // block * block
    assert plan.context_tokens == plan.kv_bytes // block * 64
    assert plan.chunk_tokens % 64 == 0
    assert plan.scratch_bytes <= 120 * MiB
    assert scratch_bytes(spec, plan.chunk_tokens + 64) > 120 * MiB
    assert plan.total_bytes <= 1200 * MiB
    slot = plan.layout.classes[0].slot_bytes
    assert plan.total_bytes > 1200 * MiB - 2 * slot  # nothing of size is left over
    assert not plan.everything_fits


@pytest.mark.parametrize(
    ("memory_mib", "prompt_tokens", "chunk_tokens"),
    [
        (760, 512, 512),  # a tenth would be two chunks, and every expert read twice
        (760, 1100, 576),  # two, alike
        (4000, 512, 512),
        (4000, 3000, 1536),
    ],
)
def test_chunks_of_a_known_prompt_are_few_and_alike(
    tiny: ModelSpec, memory_mib: int, prompt_tokens: int, chunk_tokens: int
) -> None:
    spec, memory_bytes = large(tiny), memory_mib * MiB
    only = OnlySequence(prompt_tokens, prompt_tokens + 100)
    request = dataclasses.replace(DEFAULT, memory_bytes=memory_bytes, only=only)
    plan = plan_memory(request, spec, AMPLE)
    assert plan.chunk_tokens == chunk_tokens
    assert plan.scratch_bytes <= memory_bytes * SCRATCH_SHARE_OF_PROMPT
    assert plan.total_bytes <= memory_bytes


def test_more_readers_leave_less_pool(tiny: ModelSpec) -> None:
    spec = large(tiny)
    pools = []
    for n_workers in (0, 1, 8):
        request = dataclasses.replace(DEFAULT, memory_bytes=1200 * MiB, n_io_workers=n_workers)
        pools.append(plan_memory(request, spec, AMPLE).pool_bytes)
    assert pools[0] > pools[1] > pools[2]


def test_one_given_prompt_gets_the_context_it_needs_and_the_pool_the_rest(tiny: ModelSpec) -> None:
    spec = large(tiny)
    service = dataclasses.replace(DEFAULT, memory_bytes=1200 * MiB)
    plan = plan_memory(
        dataclasses.replace(service, only=OnlySequence(prompt_tokens=70, all_tokens=300)),
        spec,
        AMPLE,
    )
    assert plan.context_tokens == 300
    assert plan.kv_bytes == 5 * kv_block_bytes(spec, "f16")
    assert plan.chunk_tokens == 128
    assert plan.pool_bytes > plan_memory(service, spec, AMPLE).pool_bytes + 200 * MiB
    # a longer one is bounded like any other, and what was asked for stands
    long = dataclasses.replace(service, only=OnlySequence(100_000, 100_100))
    assert plan_memory(long, spec, AMPLE) == plan_memory(service, spec, AMPLE)
    asked = dataclasses.replace(long, context_tokens=640, only=OnlySequence(10, 20))
    assert plan_memory(asked, spec, AMPLE).context_tokens == 640


def test_what_an_evaluation_holds_is_paid_for(tiny: ModelSpec) -> None:
    spec = large(tiny)
    answer = OnlySequence(5000, 5001)
    evaluation = dataclasses.replace(answer, keeps_logits=True)
    plans = [
        plan_memory(dataclasses.replace(DEFAULT, memory_bytes=1200 * MiB, only=only), spec, AMPLE)
        for only in (answer, evaluation)
    ]
    held = 32 * 4 * spec.vocabulary_size + 2 * 5000 * spec.n_layers * spec.n_active
    with_it = scratch_bytes(spec, plans[1].chunk_tokens) + held
    assert plans[1].scratch_bytes == with_it
    assert plans[0].scratch_bytes == scratch_bytes(spec, plans[0].chunk_tokens)
    assert plans[1].total_bytes <= 1200 * MiB


def test_tokens_and_merges_of_the_tokenizer_are_paid_for(tiny: ModelSpec) -> None:
    more = dataclasses.replace(tiny, n_merges=tiny.n_merges + 100_000)
    for request, n_bytes in (
        (DEFAULT, 10_000_000),
        (dataclasses.replace(DEFAULT, has_http=True), 38_000_000),
    ):
        plans = [plan_memory(request, spec, AMPLE) for spec in (tiny, more)]
        assert plans[1].processes_bytes - plans[0].processes_bytes == n_bytes


def test_a_pool_below_the_token_cycle_is_told(tiny: ModelSpec) -> None:
    spec = large(tiny)
    cycle = token_cycle_bytes(spec)
    assert cycle == 16 * 8 * 3 * 1024 * 2048 // 256 * 144
    below = dataclasses.replace(DEFAULT, pool=PoolSize(n_bytes=cycle // 2))
    plan = plan_memory(below, spec, AMPLE)
    assert not plan.holds_token_cycle
    assert "smaller than the token cycle 432 MiB" in str(plan.warning())
    above = dataclasses.replace(DEFAULT, pool=PoolSize(n_bytes=cycle * 2))
    assert plan_memory(above, spec, AMPLE).warning() is None


def test_context_and_chunk_shrink_before_the_plan_is_refused(tiny: ModelSpec) -> None:
    spec = large(tiny)
    with pytest.raises(ResourceError) as caught:
        plan_memory(dataclasses.replace(DEFAULT, memory_bytes=100 * MiB), spec, AMPLE)
    line = str(caught.value)
    assert line.startswith("memory: expected at least ")
    assert "KV cache of 512 tokens" in line
    assert "found 100 MiB (--memory)" in line
    least = 1
    while True:  # the smallest budget in MiB that is not refused
        try:
            request = dataclasses.replace(DEFAULT, memory_bytes=least * MiB)
            plan = plan_memory(request, spec, AMPLE)
            break
        except ResourceError:
            least += 1
    assert (plan.context_tokens, plan.chunk_tokens) == (512, 64)
    assert plan.pool_bytes >= smallest_pool_bytes(spec.slabs)


def test_more_than_the_machine_has_is_refused_with_the_file_that_says_so(tiny: ModelSpec) -> None:
    limit = AvailableMemory(120 * MiB, "/sys/fs/cgroup/memory/box/memory.limit_in_bytes")
    request = dataclasses.replace(DEFAULT, memory_bytes=200 * MiB)
    with pytest.raises(ResourceError) as caught:
        plan_memory(request, tiny, limit)
    assert str(caught.value) == (
        "--memory: expected at most 120 MiB (what /sys/fs/cgroup/memory/box/memory.limit_in_bytes "
        "leaves), found 200 MiB; use a smaller --memory or stop other programs"
    )


def test_a_pool_above_the_limit_is_refused_before_anything_is_allocated(tiny: ModelSpec) -> None:
    limit = AvailableMemory(800 * MiB, "/sys/fs/cgroup/memory.max")
    request = dataclasses.replace(DEFAULT, pool=PoolSize(n_bytes=700 * MiB))
    with pytest.raises(ResourceError) as caught:
        plan_memory(request, large(tiny), limit)
    assert "/sys/fs/cgroup/memory.max less 256 MiB" in str(caught.value)
    assert "pool 70" in str(caught.value)  # with its page tables


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"context_tokens": 4096}, "--context: expected at most 2048 tokens (what the model was"),
        ({"pool": PoolSize(n_bytes=1024)}, "--pool: expected at least "),
        ({"pool": PoolSize(share=0.01)}, "--pool: expected at least "),
    ],
)
def test_what_the_model_cannot_have(tiny: ModelSpec, change: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_memory(dataclasses.replace(DEFAULT, **change), tiny, AMPLE)  # type: ignore[arg-type]
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_the_smallest_pool_is_accepted(tiny: ModelSpec) -> None:
    smallest = smallest_pool_bytes(tiny.slabs)
    request = dataclasses.replace(DEFAULT, pool=PoolSize(n_bytes=smallest))
    plan = plan_memory(request, tiny, AMPLE)
    assert (plan.pool_bytes, plan.layout.n_slots) == (smallest, 2)


@settings(max_examples=200, deadline=None)
@given(
    memory_mib=st.integers(1, 6000),
    pool=st.sampled_from([None, PoolSize(share=0.1), PoolSize(share=1.0), PoolSize(90 * MiB)]),
    context=st.sampled_from([None, 16, 777, 4096]),
    chunk=st.sampled_from([None, 64, 2048]),
    kv_type=st.sampled_from(["f32", "f16", "q8_0"]),
    n_io_workers=st.integers(0, 4),
    single=st.booleans(),
    only=st.sampled_from([None, OnlySequence(5, 9), OnlySequence(700, 5000)]),
)
def test_every_plan_stays_within_its_budget(
    tiny: ModelSpec, memory_mib: int, pool: PoolSize | None, context: int | None,
    chunk: int | None, kv_type: str, n_io_workers: int, single: bool, only: OnlySequence | None,
) -> None:  # fmt: skip
    request = MemoryRequest(
        memory_mib * MiB, pool, context, chunk, kv_type, n_io_workers, 4, single, only=only
    )
    spec = large(tiny)
    try:
        plan = plan_memory(request, spec, AMPLE)
    except ResourceError as error:
        assert "\n" not in str(error)
        return
    assert plan.total_bytes <= plan.budget_bytes == memory_mib * MiB
    assert plan.layout.total_bytes == plan.pool_bytes <= plan.pool_limit_bytes
    assert plan.pool_bytes >= smallest_pool_bytes(spec.slabs)
    assert context in (None, plan.context_tokens)
    assert chunk in (None, plan.chunk_tokens)
    if context is None:
        assert min(512, only.all_tokens if only else 512) <= plan.context_tokens
        assert plan.context_tokens <= spec.context_length
    # asked for what it chose, it chooses the same
    fixed = dataclasses.replace(
        request,
        pool=PoolSize(n_bytes=plan.pool_limit_bytes),
        context_tokens=plan.context_tokens,
        chunk_tokens=plan.chunk_tokens,
    )
    assert plan_memory(fixed, spec, AMPLE) == plan


@pytest.mark.parametrize(
    ("n_sequences", "context", "memory_mib", "n_blocks"),
    [
        (1, 640, 1200, 10),
        (3, 640, 1200, 30),
        (30, 640, 1200, 30),  # a fifth of the budget: 240 MiB of 8 MiB each
        (3, 4096, 1200, 64),  # one sequence of the context in any case
        (2, None, 1200, 30),  # the longest that a fifth holds: the sequences share it
    ],
)
def test_sequences_that_run_at_once_share_a_fifth_of_the_budget(
    tiny: ModelSpec, n_sequences: int, context: int | None, memory_mib: int, n_blocks: int
) -> None:
    spec = large(tiny)
    request = dataclasses.replace(
        DEFAULT,
        memory_bytes=memory_mib * MiB,
        context_tokens=context,
        n_sequences=n_sequences,
    )
    plan = plan_memory(request, spec, AMPLE)
    assert plan.n_kv_blocks == n_blocks
    assert plan.kv_bytes == n_blocks * kv_block_bytes(spec, "f16")
    assert plan.n_sequences == n_sequences
