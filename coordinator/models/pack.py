"""`moe-coord pack`: writes a model anew with every expert in one piece (`io_worker.packed_layout`).

The source is only read. An interrupted run is gone on with by the same command and ends with the
same bytes.
"""

from collections.abc import Iterator, Sequence

from compute_worker.arch import resolve
from coordinator.command.commands import PackCommand
from coordinator.command.flag_values import ConfigError
from coordinator.command.signals import stop_signals
from coordinator.command.sizes import format_size
from coordinator.command.terminal import Terminal
from coordinator.models.packed_header import PackedFile, packed_file
from coordinator.models.part_file import PartFile, identity_of, part_file, part_of
from io_worker.gguf_header import MAX_TENSORS
from io_worker.model_file import is_part_name, open_model
from io_worker.model_units import UnitReader, UnitThreads, batches
from io_worker.packed_layout import checksum_of
from io_worker.reader import ModelFile, ModelFileError, ReadError, close_files, open_files

BATCH_BYTES = 64 << 20  # between two flushes; what a kill may cost


def run_pack(command: PackCommand) -> int:
    """Pack, with progress; the exit code. Raises `ConfigError`, `ResourceError`,
    `ModelFormatError`, `ModelFileError`."""
    if is_part_name(command.out.name):
        raise ConfigError(
            f"OUT: expected a name of one file, found {str(command.out)!a}, a part of a set"
        )
    model = open_model(command.model)
    if model.is_packed:
        raise ConfigError(f"MODEL: expected a plain model, found {str(command.model)!a} packed")
    packed = packed_file(model, resolve(model).slabs)
    n_tensors = sum(len(unit.ranges) for unit in packed.units)
    if n_tensors > MAX_TENSORS:
        raise ConfigError(
            f"MODEL: expected at most {MAX_TENSORS} matrices of experts, found {n_tensors}; it "
            "cannot be packed"
        )
    files = open_files(model.paths)
    try:
        return _write(command, packed, files)
    except ReadError as error:
        raise ModelFileError(str(error)) from error
    finally:
        close_files(files)


def _write(command: PackCommand, packed: PackedFile, files: list[ModelFile]) -> int:
    with (
        Terminal() as terminal,
        stop_signals() as stop,
        part_file(command.out, packed, identity_of(files)) as part,
    ):
        if part.was_begun:
            share = 100 * part.n_done // len(packed.units)
            terminal.line(f"goes on with {part_of(command.out)}: {share} % are there")
        for done_bytes in write_units(part, packed, files):
            terminal.progress("packing", done_bytes, packed.total_bytes)
            if stop.exit_code is not None:
                terminal.end_progress()
                terminal.line(f"stopped; the same command goes on with {part_of(command.out)}")
                return stop.exit_code
        part.finish()
        terminal.end_progress()
        terminal.line(
            f"wrote {command.out}: {format_size(packed.total_bytes)}; "
            f"`moe-coord verify {command.out}` compares it with its checksums"
        )
    return 0


def write_units(
    part: PartFile,
    packed: PackedFile,
    files: Sequence[ModelFile],
    batch_bytes: int = BATCH_BYTES,
) -> Iterator[int]:
    """Write what is missing, batch by batch; yields the bytes that are there after each."""

    def copied(reader: UnitReader, place: int) -> Iterator[memoryview]:
        starts = packed.places[place]
        for index, start, piece in reader.pieces(packed.units[place]):
            part.write(piece, starts[index] + start)
            yield piece

    def copy(reader: UnitReader, place: int) -> int:
        return checksum_of(copied(reader, place))

    with UnitThreads(files) as threads:
        for batch in batches(packed.units, part.n_done, batch_bytes):
            part.commit(batch, threads.each(copy, batch))
            last = packed.places[batch[-1]]
            yield last[-1] + packed.units[batch[-1]].ranges[-1].n_bytes
