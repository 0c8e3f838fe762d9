"""Puts the compute side together from its settings: weights, kernels, KV cache, feed, engine.

Used by the process of its own (`__main__`) and by ``--single-process``, which differ in the link.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from compute_worker.engine import Engine
from compute_worker.feed import ExpertFeed
from compute_worker.guess import RouterGuess
from compute_worker.kept import KeptPrompt
from compute_worker.kernel_choice import select
from compute_worker.kernels import Kernels
from compute_worker.kv import KvCache
from compute_worker.link import Link
from compute_worker.matrix import Bytes, Floats
from compute_worker.regions import Regions
from compute_worker.settings import ComputeSettings
from compute_worker.weights import LockOutcome, load_weights, lock_memory, map_weights
from shm.mapped_files import MappedFiles
from shm.pool import PoolMapping

TellProgress = Callable[[str, int, int], None]  # phase, done, total


class LockRefused(Exception):
    """``--mlock require`` and the system does not let us; the text has the figures."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """Everything that computes, and what is worth telling of its start."""

    engine: Engine
    feed: ExpertFeed
    kernels: Kernels
    dense_bytes: int
    locked_bytes: int
    warnings: tuple[str, ...]


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
    lock = _lock(weights.arena, settings.mlock)
    kv = KvCache(
        spec.n_layers, spec.n_kv_heads, spec.head_width, settings.n_kv_blocks, settings.kv_kind
    )
    guess = RouterGuess(weights, kernels) if settings.guess_next_layer else _no_guess
    regions = Regions(pool, mapped)
    feed = ExpertFeed(link, regions, spec.slabs, spec.n_active, kernels, guess)
    keep_fd = settings.keep_fd
    on_kept = None if keep_fd is None else lambda kept: _write_kept(keep_fd, kept)
    engine = Engine(weights, kernels, kv, feed, link, on_kept)
    warnings = (lock.refusal,) if lock.refusal else ()
    return Assembled(engine, feed, kernels, weights.arena.nbytes, lock.locked_bytes, warnings)


def _no_guess(layer: int, x: Floats) -> tuple[int, ...]:
    return ()


def _lock(arena: Bytes, wanted: str) -> LockOutcome:
    if wanted == "off":
        return LockOutcome(0, arena.nbytes, "")
    outcome = lock_memory(arena)
    if outcome.refusal and wanted == "require":
        raise LockRefused(outcome.refusal)
    return outcome


def _write_kept(fd: int, kept: KeptPrompt) -> None:
    with os.fdopen(os.dup(fd), "wb") as file:
        kept.write(file)
