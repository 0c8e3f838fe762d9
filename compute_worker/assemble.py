"""Puts the compute side together from its settings: weights, kernels, KV cache, feed, engine.

Used by the process of its own (`__main__`) and by ``--single-process``, which differ in the link.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from compute_worker.engine import Engine
from compute_worker.feed import ExpertFeed
from compute_worker.kernel_choice import select
from compute_worker.kernels import Kernels
from compute_worker.kv import KvCache
from compute_worker.link import Link
from compute_worker.locked import LockOutcome, LockRefused, lock_as_wanted, refusal_to_lock
from compute_worker.matrix import Bytes
from compute_worker.memory_trial import try_memory
from compute_worker.own_memory import OwnMemory
from compute_worker.regions import Regions
from compute_worker.settings import ComputeSettings
from compute_worker.weights import load_weights, map_weights
from shm.mapped_files import MappedFiles
from shm.pool import PoolMapping

TellProgress = Callable[[str, int, int], None]  # phase, done, total


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """Where experts will lie that stay for good: "pool" or "own", and why, if it was a choice."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Assembled:
    """Everything that computes, and what is worth telling of its start."""

    engine: Engine
    feed: ExpertFeed
    kernels: Kernels
    dense_bytes: int
    lock: LockOutcome
    experts_in: ExpertMemory
    warnings: tuple[str, ...]

    @property
    def settings(self) -> dict[str, str]:
        """What became of settings that are found out here, by flag."""
        return {
            "kernels": self.kernels.name.partition(" ")[0],
            "mlock": self.lock.setting,
            "experts-in": self.experts_in.name,
        }


def assemble(
    settings: ComputeSettings, pool: PoolMapping | None, link: Link, tell: TellProgress
) -> Assembled:
    """Load and connect; without a pool experts are computed where the files are mapped.

    Raises `ModelFormatError`, `KernelError`, `LockRefused`, `MemoryError`.
    """
    spec, files = settings.spec, settings.files
    kernels = select(settings.kernels, settings.numerics, settings.n_threads)
    mapped = None
    if pool is None or settings.dense == "mapped":
        mapped = MappedFiles([file.fd for file in files], [file.size_bytes for file in files])
    if settings.dense == "mapped" and mapped is not None:
        weights = map_weights(spec, files, mapped)
    else:
        weights = load_weights(spec, files, lambda done, total: tell("dense", done, total))
    experts_in = _expert_memory(settings, pool, kernels)
    lock = _lock(settings, weights.arena, pool, experts_in)
    kv = KvCache(
        spec.n_layers, spec.n_kv_heads, spec.head_width, settings.n_kv_blocks, settings.kv_kind
    )
    regions = Regions(pool, mapped)
    own = OwnMemory(regions, spec.slabs, locks=lock.setting == "all")
    feed = ExpertFeed(link, regions, spec.slabs, spec.n_active, kernels, own)
    engine = Engine(weights, kernels, kv, feed, link, settings.keep_fd)
    warnings = (lock.refusal,) if lock.refusal else ()
    return Assembled(engine, feed, kernels, weights.arena.nbytes, lock, experts_in, warnings)


def _expert_memory(
    settings: ComputeSettings, pool: PoolMapping | None, kernels: Kernels
) -> ExpertMemory:
    """What was asked for, or what makes the run shorter."""
    if pool is None or settings.experts_in != "auto":
        return ExpertMemory(settings.experts_in, "")
    if not pool.is_whole:  # a compute before this one: a trial would take back what was given up
        return ExpertMemory("pool", "no trial, since the pool has given memory back")
    trial = try_memory(pool.view, kernels.read_all)
    kernels.park()
    slabs, n_active = settings.spec.slabs, settings.spec.n_active
    token_bytes = slabs.total_bytes * n_active // slabs.n_experts
    pays = trial.pays(slabs.total_bytes, token_bytes, settings.n_tokens)
    return ExpertMemory("own" if pays else "pool", str(trial))


def _lock(
    settings: ComputeSettings, arena: Bytes, pool: PoolMapping | None, experts_in: ExpertMemory
) -> LockOutcome:
    """Lock the weights and the pool; experts in memory of their own are locked as they come, so
    that only the limit can tell now."""
    if experts_in.name != "own":
        whole = None if pool is None else np.frombuffer(pool.view, np.uint8)
        return lock_as_wanted(settings.mlock, arena, whole)
    dense = lock_as_wanted(settings.mlock, arena)
    needed = dense.needed_bytes + settings.spec.slabs.total_bytes
    if settings.mlock == "off" or dense.refusal:
        return LockOutcome(dense.locked_bytes, needed, dense.refusal)
    refusal = refusal_to_lock(needed)
    if refusal and settings.mlock == "require":
        raise LockRefused(refusal)
    return LockOutcome(dense.locked_bytes if refusal else needed, needed, refusal)
