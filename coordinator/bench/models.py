"""The files that a comparison measures: named, written on the disk under test, or copied.

Pages of a file are shared by all who read it. Where another process holds them, they can be
neither dropped nor charged to the block that is measured, so the file is measured as a copy, which
costs no bytes where the file system can clone.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compute_worker.arch import ModelSpec, resolve
from coordinator.bench.arms import model_of_arm
from coordinator.bench.cache import cached_bytes, drop_files
from coordinator.bench.records import FOREIGN_BYTES, make_folder
from coordinator.command.bench_commands import BenchCommand
from coordinator.command.commands import SynthCommand
from coordinator.command.flag_values import ConfigError
from coordinator.command.signals import StopSignals
from coordinator.command.sizes import format_size
from coordinator.models.synth import run_synth
from coordinator.processes.limits import ResourceError
from io_worker.model_file import open_model

FICLONE = 0x40049409  # ioctl of Linux: both files share their blocks until one is written
COPY_BYTES = 64 << 20  # at once
SPARE_BYTES = 256 << 20  # left free on the disk
COPY_PREFIX = ".bench-copy-"
LEFTOVER_SECONDS = 60.0  # a younger folder is about to be locked
SYNTH_MIXES = ("q4_k_m", "q2_k")


@dataclass(frozen=True, slots=True)
class Measured:
    """A model under test. `paths` are all its files."""

    path: Path
    paths: tuple[Path, ...]
    fingerprint: str
    name: str
    spec: ModelSpec
    expert_bytes: int


def models_of(bench: BenchCommand) -> tuple[Path, ...]:
    """The files that were named, or synthetic ones that are written now (and kept).

    Raises `ConfigError`, `ResourceError`.
    """
    if bench.files and bench.synth:
        raise ConfigError("--synth: expected no MODEL with it, found one; drop one of the two")
    if bench.files:
        wanted = 2 if bench.question == "quant" else 1
        if len(bench.files) != wanted:
            raise ConfigError(
                f"MODEL: expected {wanted} file{'s' if wanted > 1 else ''}, found "
                f"{len(bench.files)}; two are for --question quant"
            )
        return bench.files
    if not bench.synth:
        raise ConfigError(
            "MODEL: expected a GGUF file, found none; name one that lies on the disk to be "
            "measured, or give --synth --out DIR to have one of OLMoE's shapes written there"
        )
    if bench.out is None:
        raise ConfigError("--synth: expected --out DIR with it, found none; the file goes there")
    mixes = SYNTH_MIXES if bench.question == "quant" else SYNTH_MIXES[:1]
    return tuple(_synthetic(bench.out, mix, bench.layers) for mix in mixes)


def models_of_arms(bench: BenchCommand) -> tuple[Path, ...]:
    """The files beside MODEL that arms name, each once. Raises `ConfigError`."""
    known = {path.resolve() for path in bench.files}
    found = []
    for arm in bench.arms:
        path = model_of_arm(arm, bench.model)
        if path.resolve() not in known:
            known.add(path.resolve())
            found.append(path)
    return tuple(found)


def measured_model(path: Path) -> Measured:
    """What a comparison wants to know of a file. Raises `ModelFormatError`, `ModelFileError`."""
    model = open_model(path)
    spec = resolve(model)
    name = str(model.metadata.get("general.name", path.name))
    paths = tuple(map(Path, model.paths))
    return Measured(path, paths, model.fingerprint, name, spec, spec.slabs.total_bytes)


@contextlib.contextmanager
def own_files(
    models: Sequence[Measured], folder: Path | None, mode: str, stop: StopSignals
) -> Iterator[dict[Path, Path]]:
    """Copies to measure in the place of models, by the path of each; removed at the end.

    With `auto` only where pages stay in the cache after they were dropped. `folder` None: beside
    the file. After a signal no copy is whole. Raises `ResourceError` without room for one, and
    `ConfigError` for a folder that cannot be made.
    """
    with contextlib.ExitStack() as stack:
        copies: dict[Path, Path] = {}
        for model in models:
            if stop.received is not None:
                break
            if mode == "always" or (mode == "auto" and any(map(_is_held, model.paths))):
                if folder is not None:
                    make_folder(folder)
                target = stack.enter_context(_place_in(folder or model.path.parent))
                for path in model.paths:
                    copy_file(path, target / path.name, stop)
                copies[model.path] = target / model.path.name
        yield copies


@contextlib.contextmanager
def _place_in(parent: Path) -> Iterator[Path]:
    """A folder for copies, locked as long as it is there; those of runs that were killed go."""
    for left in parent.glob(f"{COPY_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(left):  # it may be in use, or another user's
            if time.time() - left.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=COPY_PREFIX, dir=parent) as name, _locked(Path(name)):
        yield Path(name)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises `BlockingIOError` where another process has locked it, `OSError`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _is_held(path: Path) -> bool:
    """Whether somebody keeps pages of it that we cannot drop."""
    drop_files([path])
    return (cached_bytes([path]) or 0) > FOREIGN_BYTES


def copy_file(source: Path, target: Path, stop: StopSignals) -> None:
    """A clone where that is possible; after a signal a part. Raises `ResourceError`: no room."""
    with source.open("rb") as reading, target.open("xb") as writing:
        try:
            fcntl.ioctl(writing.fileno(), FICLONE, reading.fileno())
            return
        except OSError:  # no such feature here, or another file system: copy the bytes
            n_bytes = os.fstat(reading.fileno()).st_size
        free = shutil.disk_usage(target.parent).free
        if free < n_bytes + SPARE_BYTES:
            raise ResourceError(
                f"--copy: expected {format_size(n_bytes + SPARE_BYTES)} free for a copy of "
                f"{source}, which another process holds in memory, found {format_size(free)}; "
                "end that process, make room, or give --copy never"
            )
        while os.sendfile(writing.fileno(), reading.fileno(), None, COPY_BYTES):
            os.fdatasync(writing.fileno())  # here, so that the end need not wait for all of it
            if stop.received is not None:
                return
        os.fsync(writing.fileno())


def _synthetic(folder: Path, mix: str, n_layers: int) -> Path:
    path = folder / f"synthetic-olmoe-{mix}-{n_layers}-layers.gguf"
    if not path.exists():
        make_folder(folder)
        run_synth(SynthCommand("olmoe", mix, path, n_layers))
    return path
