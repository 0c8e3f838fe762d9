"""`moe-coord verify`: reads every tensor and slab of a model and compares it with its checksum.

A packed file has its checksums in its header. A plain one gets them from a manifest: a packed file
of the same model, or a JSON file that `--write-manifest` wrote:

    {"format": "moe-coord checksums 1", "fingerprint": "…", "checksums": ["0f…", …]}

in the order of `model_units`. A manifest of another model is refused by its fingerprint.
"""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compute_worker.arch import resolve
from coordinator.command.commands import VerifyCommand
from coordinator.command.flag_values import ConfigError
from coordinator.command.signals import stop_signals
from coordinator.command.sizes import format_size
from coordinator.command.terminal import Terminal
from io_worker.gguf_header import ModelFormatError
from io_worker.model_file import Model, open_model
from io_worker.model_units import Unit, UnitReader, UnitThreads, batches, units_of
from io_worker.reader import ModelFileError, ReadError, close_files, open_files

FORMAT = "moe-coord checksums 1"
MAX_MANIFEST_BYTES = 64 << 20
BATCH_BYTES = 256 << 20  # between two looks at signals


def run_verify(command: VerifyCommand) -> int:
    """Compare, with progress; the exit code. Raises `ModelFormatError` for the first damaged part,
    `ModelFileError`, `ConfigError`."""
    model = open_model(command.model)
    units = units_of(model, resolve(model).slabs)
    expected = _expected(command, model, len(units))
    if command.write_manifest is not None and os.path.lexists(command.write_manifest):
        raise _cannot_write(command.write_manifest, os.strerror(errno.EEXIST))
    files = open_files(model.paths)
    found: list[int] = []
    try:
        with Terminal() as terminal, stop_signals() as stop, UnitThreads(files) as threads:

            def checksum(reader: UnitReader, place: int) -> int:
                return reader.checksum(units[place])

            for batch in batches(units, 0, BATCH_BYTES):
                found += threads.each(checksum, batch)
                if expected is not None:
                    _compare(model, units, batch, expected, found)
                terminal.progress("verifying", len(found), len(units))
                if stop.exit_code is not None:
                    return stop.exit_code
            terminal.end_progress()
            n_bytes = sum(unit.n_bytes for unit in units)
            verb = "read" if expected is None else "are as they were"
            terminal.line(f"{command.model}: {len(units)} parts, {format_size(n_bytes)}, {verb}")
    except ReadError as error:
        raise ModelFileError(str(error)) from error
    finally:
        close_files(files)
    if command.write_manifest is not None:
        _write_manifest(command.write_manifest, model.fingerprint, found)
    return 0


def _compare(
    model: Model, units: Sequence[Unit], batch: range, expected: Sequence[int], found: Sequence[int]
) -> None:
    for place in batch:
        if found[place] != expected[place]:
            first = units[place].ranges[0]
            raise ModelFormatError(
                model.paths[first.file],
                units[place].label,
                f"expected checksum {expected[place]:016x}, found {found[place]:016x}; the file is "
                "damaged, " + ("pack the model again" if model.is_packed else "fetch it again"),
                first.offset,
            )


def _expected(command: VerifyCommand, model: Model, n_units: int) -> Sequence[int] | None:
    """Checksums of the units; None where they are only to be written."""
    if command.manifest is not None:
        fingerprint, checksums = _read_manifest(command.manifest)
        if fingerprint != model.fingerprint or len(checksums) != n_units:
            raise ModelFormatError(
                str(command.manifest),
                "fingerprint",
                f"expected checksums of this model ({model.fingerprint}), found those of another "
                f"model or version ({fingerprint})",
            )
        return checksums
    if model.is_packed:
        return model.checksums[1:]
    if command.write_manifest is None:
        raise ConfigError(
            "--manifest: expected one, as a plain model has no checksums of its own; give a packed "
            "file of the same model, or make one with --write-manifest FILE"
        )
    return None


def _read_manifest(path: Path) -> tuple[str, Sequence[int]]:
    """Fingerprint and checksums; raises `ModelFormatError`."""
    try:
        with path.open("rb") as file:
            data = file.read(4)
            if data == b"GGUF":
                packed = open_model(path)
                if not packed.is_packed:
                    raise _bad_manifest(path, "found a plain model")
                return packed.fingerprint, packed.checksums[1:]
            data += file.read(MAX_MANIFEST_BYTES)
        content: Any = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise _bad_manifest(path, f"found: {error!s:.80}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _bad_manifest(path, "found another format")
    try:
        return str(content["fingerprint"])[:40], [int(text, 16) for text in content["checksums"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _bad_manifest(path, "found another list") from error


def _bad_manifest(path: Path, found: str) -> ModelFormatError:
    return ModelFormatError(str(path), "manifest", f"expected checksums of a model, {found}")


def _write_manifest(path: Path, fingerprint: str, checksums: Sequence[int]) -> None:
    texts = [f"{checksum:016x}" for checksum in checksums]
    content = {"format": FORMAT, "fingerprint": fingerprint, "checksums": texts}
    try:
        with path.open("x", encoding="ascii") as file:
            json.dump(content, file)
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from error


def _cannot_write(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"--write-manifest: {path}: cannot be written: {reason}; give a new file")
