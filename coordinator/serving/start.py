"""Starts the engine of a prepared run: pool, process settings, processes."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from compute_worker.settings import ComputeSettings, LocalReads
from compute_worker.settings import encode_settings as encode_compute
from coordinator.plan.setup import Setup, build_core
from coordinator.processes.compute_messages import decoder_for_model
from coordinator.processes.engine import COMPUTE, Engine
from coordinator.processes.launch import ChildSpec
from coordinator.processes.listener import Front, Listener
from coordinator.processes.memory_watch import MemoryWatch
from io_worker.reader import descriptors
from io_worker.settings import IoSettings
from io_worker.settings import encode_settings as encode_io
from shm.free_memory import give_back_freed
from shm.notices import notice_pipe
from shm.pool import create_pool, read_only
from shm.time_slices import SHORT_NANOSECONDS, set_slice


@contextlib.contextmanager
def started(
    setup: Setup,
    listener: Listener,
    *,
    keep_fd: int | None = None,
    root: Path = Path("/"),
    front: Front | None = None,
    compute_fds: tuple[int, ...] = (),
) -> Iterator[Engine]:
    """Processes of the run, up but not ready yet (`run_once` until `is_ready`).

    `root` is where the `proc` and `sys` lie that say how much memory is left; `compute_fds` are
    inherited by compute. What only a tokenizer needs of the model's header is gone then.
    Raises `PoolError`, `ResourceError`, `LinkError`, `OSError`, `EngineError`.
    """
    config = setup.config
    setup.model.drop_arrays()
    give_back_freed()
    with contextlib.ExitStack() as stack:
        pool_fd = read_only_fd = None
        if config.has_pool:
            pool_fd = create_pool(setup.plan.layout)
            stack.callback(os.close, pool_fd)
            read_only_fd = read_only(pool_fd)
            stack.callback(os.close, read_only_fd)
        notice_fd = tell_fd = None
        if config.has_pool and config.io_workers:
            notice_fd, tell_fd = notice_pipe()  # kept open: it outlives any process at its ends
            stack.callback(os.close, notice_fd)
            stack.callback(os.close, tell_fd)
        compute_reads = config.io_workers == 0 and not config.only_faults
        compute = ChildSpec(
            name=COMPUTE,
            module="compute_worker",
            cores=setup.cores.compute if setup.cores else (),
            pool_fd=pool_fd if compute_reads else read_only_fd,
            layout=setup.plan.layout,
            file_fds=descriptors(setup.files),
            other_fds=(*compute_fds, *((keep_fd,) if keep_fd is not None else ())),
            settings=encode_compute(compute_settings(setup, keep_fd)),
            notice_fd=notice_fd,
            decode=decoder_for_model(
                setup.spec.slabs, setup.spec.vocabulary_size, has_pool=config.has_pool
            ),
        )
        memory = MemoryWatch(pool_fd, setup.plan.layout, setup.plan.budget_bytes, root)
        engine = Engine(
            build_core(setup),
            [*io_worker_specs(setup, pool_fd, tell_fd), compute],
            setup.reader_credit,
            memory,
            setup.files,
            listener,
            compute_reads=compute_reads,
            maps_files=setup.maps_files,
            front=front,
        )
        set_slice(SHORT_NANOSECONDS)  # before it starts threads that carry messages
        yield stack.enter_context(engine)


def io_worker_specs(setup: Setup, pool_fd: int | None, notice_fd: int | None) -> list[ChildSpec]:
    """The I/O workers io0, io1, …; all are told the same."""
    config = setup.config
    settings = encode_io(
        IoSettings(setup.files, setup.reader.name, config.queue_depth, config.drop_cache == "yes")
    )
    return [
        ChildSpec(
            name=f"io{number}",
            module="io_worker",
            cores=setup.cores.io if setup.cores else (),
            pool_fd=pool_fd,
            layout=setup.plan.layout,
            file_fds=descriptors(setup.files),
            other_fds=(),
            settings=settings,
            notice_fd=notice_fd,
        )
        for number in range(config.io_workers)
    ]


def compute_settings(setup: Setup, keep_fd: int | None) -> ComputeSettings:
    """What the compute worker is told."""
    config, only = setup.config, setup.only
    local = None
    if config.io_workers == 0 and not config.only_faults:
        drop_cache = config.drop_cache == "yes"
        local = LocalReads(setup.reader.name, config.io_threads, drop_cache)
    return ComputeSettings(
        spec=setup.spec,
        files=setup.files,
        kernels=config.kernels,
        numerics=config.numerics,
        n_threads=config.compute_threads or 1,
        kv_kind=config.kv_type,
        n_kv_blocks=setup.plan.n_kv_blocks,
        mlock=config.mlock,
        dense=config.dense,
        experts_in=config.experts_in,
        n_tokens=None if only is None else only.all_tokens - only.prompt_tokens,
        local_reads=local,
        polls=config.poll == "on",
        keep_fd=keep_fd,
    )
