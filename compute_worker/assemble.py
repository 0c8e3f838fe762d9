"""Puts the compute side together from its settings: weights, kernels, KV cache, feed, engine.

Used by the process of its own (`__main__`) and by ``--single-process``, which differ in the link.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from compute_worker.engine import Engine
from compute_worker.feed import ExpertFeed
from compute_worker.guess import RouterGuess
from compute_worker.kept import KeptPrompt
from compute_worker.kernel_choice import select
from compute_worker.kernels import Kernels
from compute_worker.kv import KvCache
from compute_worker.link import Link
from compute_worker.locked import LockOutcome, lock_as_wanted
from compute_worker.matrix import Floats
from compute_worker.regions import Regions
from compute_worker.settings import ComputeSettings
from compute_worker.weights import load_weights, map_weights
from shm.mapped_files import MappedFiles
from shm.pool import PoolMapping

TellProgress = Callable[[str, int, int], None]  # phase, done, total


@dataclass(frozen=True, slots=True)
class Assembled:
    """Everything that computes, and what is worth telling of its start."""

    engine: Engine
    feed: ExpertFeed
    kernels: Kernels
    dense_bytes: int
    lock: LockOutcome
    warnings: tuple[str, ...]

    @property
    def settings(self) -> dict[str, str]:
        """What became of settings that are found out here, by flag."""
        return {"kernels": self.kernels.name.partition(" ")[0], "mlock": self.lock.setting}


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
    pools = () if pool is None else (np.frombuffer(pool.view, np.uint8),)
    lock = lock_as_wanted(settings.mlock, (weights.arena, *pools))
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
    return Assembled(engine, feed, kernels, weights.arena.nbytes, lock, warnings)


def _no_guess(layer: int, x: Floats) -> tuple[int, ...]:
    return ()


def _write_kept(fd: int, kept: KeptPrompt) -> None:
    with os.fdopen(os.dup(fd), "wb") as file:
        kept.write(file)
