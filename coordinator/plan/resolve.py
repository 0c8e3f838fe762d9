"""From what was asked for to what will be done: every "auto" becomes a value.

The only place that chooses; settings are declared in `config`, combinations are judged in
`combinations`. Functions of config, machine and model: they open nothing.
"""

import dataclasses
import secrets

from compute_worker.arch import ModelSpec, matrix_tensors
from compute_worker.native_types import NATIVE_TYPES
from coordinator.command.config import Config, shipped_model
from coordinator.command.cores import CorePlan, has_core_alone, plan_cores
from coordinator.command.sizes import PoolSize
from coordinator.plan.budget import MemoryPlan, plan_memory
from coordinator.plan.experts_in import experts_in
from coordinator.plan.machine import Machine
from coordinator.plan.memory_request import MemoryRequest, OnlySequence
from coordinator.processes.limits import ResourceError


def memory_plan(
    config: Config,
    machine: Machine,
    model: ModelSpec,
    only: OnlySequence | None = None,
    n_sequences: int = 1,
) -> MemoryPlan:
    """The plan of a config, resolved or not: both give the same one. Raises like `plan_memory`.

    `only` is the one sequence of a run, None where any may come, `n_sequences` at once. Dense
    weights that do not fit are left to the page cache, where nothing else was asked for that
    could be less: slow, but it runs.
    """
    if config.dense == "auto":
        try:
            config = dataclasses.replace(config, dense="anonymous")
            return memory_plan(config, machine, model, only, n_sequences)
        except ResourceError:
            asked = (config.pool, config.context_tokens, config.chunk_tokens)
            if config.mlock == "require" or any(size is not None for size in asked):
                raise
            config = dataclasses.replace(config, dense="mapped")
    return plan_memory(
        MemoryRequest(
            memory_bytes=config.memory_bytes,
            pool=config.pool,
            context_tokens=config.context_tokens,
            chunk_tokens=config.chunk_tokens,
            kv_type=_kv_type(config),
            n_io_workers=config.io_workers,
            n_threads=_compute_threads(config, machine)
            + config.io_threads
            + config.io_workers * config.queue_depth,
            single_process=config.single_process,
            is_shipped_model=config.model == shipped_model(),
            only=only,
            n_sequences=n_sequences,
            has_pool=config.has_pool,
            maps_dense=config.dense == "mapped",
            n_file_mappings=_n_file_mappings(config),
            has_http=config.is_service and only is None,
            dequantises=_dequantises(config, machine, model),
        ),
        model,
        machine.memory,
    )


def resolve(
    config: Config,
    machine: Machine,
    model: ModelSpec,
    only: OnlySequence | None = None,
    n_sequences: int = 1,
) -> Config:
    """The config with every "auto" that machine and model decide replaced by what was chosen.

    `reader` and `kernels` stay "auto": only the process that opens or imports them can tell; and
    `experts_in` where compute has to measure. Raises like `plan_memory` and `experts_in`.
    """
    plan = memory_plan(config, machine, model, only, n_sequences)
    is_pinned = config.pin_cores or config.core_plan is not None
    cores = plan_cores(config.core_plan, machine.cores) if is_pinned else None
    policy = config.policy
    if policy == "auto":  # counting hit most at every size in every replay: tests/hit_rates.md
        policy = "imatrix" if config.imatrix is not None else "lfu"
    drop_cache = config.drop_cache
    if drop_cache == "auto":
        drop_cache = "no" if model.slabs.total_bytes <= spare_bytes(machine, plan) else "yes"
    return dataclasses.replace(
        config,
        seed=secrets.randbelow(2**32) if config.seed is None else config.seed,
        compute_threads=_compute_threads(config, machine),
        pin_cores=is_pinned,
        core_plan=str(cores) if is_pinned else None,
        poll=_poll(config, machine, cores),
        policy=policy if config.has_pool else "none",
        prefetch=_prefetch(config),
        drop_cache=drop_cache,
        dense="mapped" if plan.maps_dense else "anonymous",
        experts_in=experts_in(config, plan, model),
        memory_bytes=plan.budget_bytes,
        pool=PoolSize(n_bytes=plan.pool_limit_bytes) if config.has_pool else None,
        context_tokens=plan.context_tokens,
        chunk_tokens=plan.chunk_tokens,
        kv_type=_kv_type(config),
    )


def _poll(config: Config, machine: Machine, cores: CorePlan | None) -> str:
    if config.poll != "auto":
        return config.poll
    has_core = has_core_alone(cores, machine.cores, machine.quota_cores)
    # threads of the compute process would wait for its interpreter
    return "on" if has_core and not config.single_process and not config.io_threads else "off"


def spare_bytes(machine: Machine, plan: MemoryPlan) -> int:
    """Memory beside the plan that nobody uses: room for a second cache."""
    return max(0, machine.memory.n_bytes - plan.total_bytes)


def _prefetch(config: Config) -> str:
    """With a trace the hits stay what `moe-coord replay` counts, which knows no guesses."""
    if config.prefetch != "auto":
        return config.prefetch
    reads_aside = config.has_pool and config.io_workers + config.io_threads > 0
    return "router" if reads_aside and config.trace is None else "off"


def _kv_type(config: Config) -> str:
    if config.kv_type != "auto":
        return config.kv_type
    return "f32" if config.numerics == "exact" else "f16"


def _dequantises(config: Config, machine: Machine, model: ModelSpec) -> bool:
    """Whether any weights are multiplied by the references."""
    if config.kernels == "numpy" or not machine.has_native_kernels:
        return True
    types = {info.type for info in matrix_tensors(model)}
    types |= {part.type for x in model.slabs.layers for part in (x.gate, x.up, x.down)}
    return not types <= NATIVE_TYPES


def _n_file_mappings(config: Config) -> int:
    """Processes that map the model files: for their page tables."""
    n_computing = 0 if config.has_pool and config.dense == "anonymous" else 1
    if config.has_pool or config.only_faults:
        return n_computing
    return n_computing + max(1, config.io_workers)


def _compute_threads(config: Config, machine: Machine) -> int:
    if config.compute_threads is not None:
        return config.compute_threads
    if config.pin_cores or config.core_plan is not None:
        planned = plan_cores(config.core_plan, machine.cores).compute_threads
        return min(planned, machine.n_effective_cores)
    return machine.n_effective_cores
