"""One memory budget for all processes: who gets how much, decided before anything is allocated.

    budget = processes + page tables + dense weights + KV cache + scratch of a prompt chunk + pool

What is not asked for is chosen in this order: the longest context that a fifth of the budget holds
(for one given prompt, no more than it and its answer need), the largest chunk whose scratch fits a
tenth, and the pool takes the rest, at most every expert.
Context and chunk shrink to their minimum before the plan is refused. `plan_memory` is a function of
its arguments: it allocates nothing and reads nothing.
"""

from dataclasses import dataclass
from fractions import Fraction

from compute_worker.arch import KV_BLOCK_TOKENS, ModelSpec, dense_bytes, kv_block_bytes
from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import PoolSize, format_size
from coordinator.core.slot_classes import (
    MIN_SLOTS,
    pool_layout,
    smallest_pool_bytes,
    whole_pool_bytes,
)
from coordinator.plan.footprint import (
    float_bytes,
    kept_bytes,
    mapped_bytes,
    processes_bytes,
    scratch_bytes,
    table_bytes,
    with_tables,
    without_tables,
)
from coordinator.plan.memory_request import MemoryRequest
from coordinator.processes.available_memory import AvailableMemory
from coordinator.processes.limits import ResourceError
from shm.pool import PoolLayout

CONTEXT_SHARE, MIN_CONTEXT_TOKENS = 5, 512  # a fifth of the budget
SCRATCH_SHARE = 10  # a tenth
# where that saves a known prompt a chunk, which would read nearly all experts again: 512 tokens of
# OLMoE in 760 MiB miss a tenth by 5 MiB
SCRATCH_SHARE_OF_PROMPT = Fraction(15, 100)
CHUNK_STEP_TOKENS, MAX_CHUNK_TOKENS = 64, 2048
SHIPPED_POOL_SHARE = 0.4  # so that a first run with the small model shows misses


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The parts of the budget, in bytes, and what they hold. Classes are by layer, in order."""

    budget_bytes: int
    source: str
    processes_bytes: int
    page_table_bytes: int
    dense_bytes: int  # in memory of their own
    maps_dense: bool
    kv_bytes: int
    scratch_bytes: int
    pool_limit_bytes: int  # what the layout was made for; `pool_bytes` is what it takes
    pool_bytes: int
    context_tokens: int  # of the longest sequence
    n_sequences: int  # that may run at once
    n_kv_blocks: int  # of 64 tokens, for all of them
    chunk_tokens: int
    layout: PoolLayout
    class_of_layer: tuple[int, ...]
    n_experts: int  # of all layers
    n_active: int  # used per token and layer
    token_cycle_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of all parts, at most the budget."""
        rest = self.processes_bytes + self.page_table_bytes + self.scratch_bytes
        return rest + self.dense_bytes + self.kv_bytes + self.pool_bytes

    @property
    def everything_fits(self) -> bool:
        """Whether the pool holds every expert."""
        return self.layout.n_slots == self.n_experts

    @property
    def n_layers_below_cycle(self) -> int:
        """Layers of the classes that do not hold what one token uses of them: a plain LRU never
        hits there."""
        n_layers = [self.class_of_layer.count(index) for index in range(len(self.layout.classes))]
        return sum(
            n
            for n, cls in zip(n_layers, self.layout.classes, strict=True)
            if cls.n_slots < self.n_active * n
        )

    @property
    def holds_token_cycle(self) -> bool:
        """Whether every class holds what one token uses of it."""
        return self.n_layers_below_cycle == 0

    def describe(self) -> str:
        """One line for people."""
        n_slots = self.layout.n_slots
        pool = (
            f"pool {format_size(self.pool_bytes)} for {n_slots} of {self.n_experts} experts "
            f"({n_slots * 100 // self.n_experts} %)"
        )
        if not n_slots:
            pool = "no pool (the page cache has the experts and is not counted here)"
        at_once = f" ({self.n_sequences} at once)" if self.n_sequences > 1 else ""
        mapped = " (the rest is left to the page cache and not counted)"
        return (
            f"memory: {format_size(self.budget_bytes)} ({self.source}): "
            f"{pool}, dense {format_size(self.dense_bytes)}{mapped if self.maps_dense else ''}, "
            f"KV {format_size(self.kv_bytes)} for {self.context_tokens} tokens{at_once}, "
            f"scratch {format_size(self.scratch_bytes)} for chunks of {self.chunk_tokens}, "
            f"processes {format_size(self.processes_bytes + self.page_table_bytes)}"
        )

    def warning(self) -> str | None:
        """One line if the pool is so small that it changes what to expect."""
        if self.everything_fits or self.holds_token_cycle:
            return None
        return (
            f"pool {format_size(self.pool_bytes)} is smaller than the token cycle "
            f"{format_size(self.token_cycle_bytes)}: --policy lru would never hit; a frequency "
            "rule (--policy lfu) or a larger --pool is better"
        )


def token_cycle_bytes(spec: ModelSpec) -> int:
    """What one token touches before it comes back to layer 0."""
    return spec.n_active * sum(layer.slab_bytes for layer in spec.slabs.layers)


def plan_memory(request: MemoryRequest, spec: ModelSpec, available: AvailableMemory) -> MemoryPlan:
    """Divide the budget.

    Raises `ConfigError` for a request that does not fit the model, `ResourceError` for one that
    does not fit the machine, or for a budget that does not hold the smallest legal plan.
    """
    _check_against_model(request, spec)
    budget, source = _budget(request, available)
    floor, wanted = _pool_bounds(request, spec)
    # the pool is mapped by compute and by every I/O worker; all other memory is mapped once
    n_mappings = 1 + request.n_io_workers
    dense = float_bytes(spec) if request.maps_dense else dense_bytes(spec)
    processes = _processes(request, spec)
    least_scratch = _scratch(request, spec, request.chunk_tokens or CHUNK_STEP_TOKENS)
    parts = {
        "processes": processes,
        "dense weights": with_tables(dense),
        "scratch": with_tables(least_scratch),
        "smallest pool" if request.pool is None else "pool": with_tables(floor, n_mappings),
    }
    room = budget - sum(parts.values())
    context, n_blocks = _context(request, spec, min(budget // CONTEXT_SHARE, room))
    kv = n_blocks * kv_block_bytes(spec, request.kv_type)
    parts[f"KV cache of {context} tokens"] = with_tables(kv)
    room -= with_tables(kv)
    if room < 0:
        raise _refusal(budget, source, parts)
    prompt = min(context, request.only.prompt_tokens if request.only else context)
    most_scratch = room + least_scratch
    chunk = request.chunk_tokens or _chunk(request, spec, prompt, budget, most_scratch)
    scratch = _scratch(request, spec, chunk)
    rest = budget - processes - with_tables(dense) - with_tables(kv) - with_tables(scratch)
    limit = max(floor, min(wanted, without_tables(rest, n_mappings)))
    layout, class_of_layer = _layout(request, spec, limit)
    pool = layout.total_bytes if request.has_pool else 0
    return MemoryPlan(
        budget_bytes=budget,
        source=source,
        processes_bytes=processes,
        page_table_bytes=sum(table_bytes(n) for n in (dense, kv, scratch))
        + table_bytes(pool, n_mappings),
        dense_bytes=dense,
        maps_dense=request.maps_dense,
        kv_bytes=kv,
        scratch_bytes=scratch,
        pool_limit_bytes=limit,
        pool_bytes=pool,
        context_tokens=context,
        n_sequences=request.n_sequences,
        n_kv_blocks=n_blocks,
        chunk_tokens=chunk,
        layout=layout,
        class_of_layer=class_of_layer,
        n_experts=spec.slabs.n_experts * len(spec.slabs.layers),
        n_active=spec.n_active,
        token_cycle_bytes=token_cycle_bytes(spec),
    )


def _processes(request: MemoryRequest, spec: ModelSpec) -> int:
    """What the processes take for themselves, with the page tables of files that they map."""
    own = processes_bytes(
        spec,
        request.n_io_workers,
        request.n_threads,
        single_process=request.single_process,
        has_http=request.has_http,
    )
    return own + table_bytes(mapped_bytes(spec, request.has_pool), request.n_file_mappings)


def _check_against_model(request: MemoryRequest, spec: ModelSpec) -> None:
    if request.context_tokens is not None and request.context_tokens > spec.context_length:
        raise ConfigError(
            f"--context: expected at most {spec.context_length} tokens (what the model was made "
            f"for), found {request.context_tokens}; use a smaller number"
        )
    if request.pool is not None and request.has_pool:
        smallest, whole = smallest_pool_bytes(spec.slabs), whole_pool_bytes(spec.slabs)
        found = request.pool.bytes_of(whole)
        if found < smallest:
            raise ConfigError(
                f"--pool: expected at least {smallest} bytes ({MIN_SLOTS} slots for the largest "
                f"expert of this model), found {found} ({request.pool}); use a larger --pool"
            )


def _budget(request: MemoryRequest, available: AvailableMemory) -> tuple[int, str]:
    if request.memory_bytes is None:
        n_bytes = max(0, available.n_bytes - available.reserve_bytes)
        return n_bytes, f"{available.source} less {format_size(available.reserve_bytes)}"
    if request.memory_bytes > available.n_bytes:
        raise ResourceError(
            f"--memory: expected at most {format_size(available.n_bytes)} (what {available.source} "
            f"leaves), found {format_size(request.memory_bytes)}; use a smaller --memory or stop "
            "other programs"
        )
    return request.memory_bytes, "--memory"


def _pool_bounds(request: MemoryRequest, spec: ModelSpec) -> tuple[int, int]:
    """Least bytes of the pool, and what it may grow to: what was asked for, at most all experts."""
    if not request.has_pool:
        return 0, 0
    whole = whole_pool_bytes(spec.slabs)
    if request.pool is not None:
        wanted = request.pool.bytes_of(whole)
        return wanted, wanted
    share = SHIPPED_POOL_SHARE if request.is_shipped_model else 1.0
    return smallest_pool_bytes(spec.slabs), PoolSize(share=share).bytes_of(whole)


def _layout(
    request: MemoryRequest, spec: ModelSpec, limit: int
) -> tuple[PoolLayout, tuple[int, ...]]:
    """Slots within the limit, and the class of every layer."""
    return (
        pool_layout(spec.slabs, spec.n_active, limit) if request.has_pool else (PoolLayout(()), ())
    )


def _context(request: MemoryRequest, spec: ModelSpec, room: int) -> tuple[int, int]:
    """Tokens of the longest sequence, and KV blocks: for each of those that run at once, as far as
    the room goes, for one in any case."""
    block = kv_block_bytes(spec, request.kv_type)
    tokens = request.context_tokens
    if tokens is None:
        held = max(room, 0) // block * KV_BLOCK_TOKENS
        longest = request.only.all_tokens if request.only else spec.context_length
        tokens = min(spec.context_length, longest, max(MIN_CONTEXT_TOKENS, held))
    own = -(-tokens // KV_BLOCK_TOKENS)
    return tokens, max(own, min(request.n_sequences * own, max(room, 0) // block))


def _chunk(
    request: MemoryRequest, spec: ModelSpec, prompt_tokens: int, budget: int, room: int
) -> int:
    """Tokens of a chunk; those of a known prompt are as few as fit, all alike."""
    chunk = _largest_chunk(request, spec, min(budget // SCRATCH_SHARE, room))
    if request.only is None:
        return min(chunk, -(-prompt_tokens // CHUNK_STEP_TOKENS) * CHUNK_STEP_TOKENS)
    larger = _largest_chunk(request, spec, min(int(budget * SCRATCH_SHARE_OF_PROMPT), room))
    own = -(-prompt_tokens // -(-prompt_tokens // larger))
    return -(-own // CHUNK_STEP_TOKENS) * CHUNK_STEP_TOKENS


def _largest_chunk(request: MemoryRequest, spec: ModelSpec, room: int) -> int:
    """The most tokens whose scratch fits a room, one step at least."""
    steps = range(CHUNK_STEP_TOKENS, MAX_CHUNK_TOKENS + 1, CHUNK_STEP_TOKENS)
    fitting = [n for n in steps if _scratch(request, spec, n) <= room]
    return max(fitting, default=CHUNK_STEP_TOKENS)


def _scratch(request: MemoryRequest, spec: ModelSpec, chunk: int) -> int:
    scratch = scratch_bytes(spec, chunk, request.n_sequences, dequantises=request.dequantises)
    only = request.only
    return scratch + (kept_bytes(spec, only.prompt_tokens) if only and only.keeps_logits else 0)


def _refusal(budget: int, source: str, parts: dict[str, int]) -> ResourceError:
    needed = sum(parts.values())
    spelled = ", ".join(f"{name} {format_size(n)}" for name, n in parts.items() if n)
    return ResourceError(
        f"memory: expected at least {format_size(needed)} ({spelled}), found "
        f"{format_size(budget)} ({source}); give more with --memory, or ask for less with "
        "--context, --pool, --io-workers or with --dense mapped"
    )
