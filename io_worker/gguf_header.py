"""The header of one GGUF file, read as hostile input: metadata and where each tensor lies.

    magic "GGUF" | version u32 | n_tensors u64 | n_kv u64
    n_kv times        key string | value type u32 | value
    n_tensors times   name string | n_dims u32 | dims u64 × n_dims | type u32 | offset u64
    padding to `general.alignment`, then the tensor data; offsets count from there

Little-endian; a string is a u64 length and UTF-8 bytes, a value is drawn in `gguf_metadata`.
Versions 2 and 3 have this same layout. Source: docs/gguf.md of ggml.

Rules to keep: those of `model_bytes`; and the tensor data are never read (at most one read-ahead
past the header). This module does not know what a key or a tensor means.
"""

import hashlib
import os
from dataclasses import dataclass
from itertools import pairwise

from io_worker.ggml_types import GGML_TYPES, row_bytes
from io_worker.gguf_metadata import MAX_ENTRIES, MIN_ENTRY_BYTES, alignment_of, read_metadata
from io_worker.model_bytes import Cursor, ModelFormatError, escaped, open_regular

__all__ = ["GgufHeader", "ModelFormatError", "TensorInfo", "escaped", "read_header"]

MAX_NAME_BYTES = 63  # GGML_MAX_NAME is 64 with the final zero
MAX_TENSORS = 100_000  # the largest old-style model, one tensor per expert, has 47,000
MAX_DIMENSIONS = 4
MAX_DIMENSION = 1 << 40
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # a one-letter name and one dimension


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` in ggml order (innermost first), `offset` absolute in file `file`."""

    name: str
    shape: tuple[int, ...]
    type: int
    file: int
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a header. Metadata values are int, float, bool, str, or a list of one of these."""

    path: str
    file_bytes: int
    version: int
    alignment: int
    data_offset: int
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]  # in the order of the header
    raw: bytes  # the header up to the padding
    digest: bytes  # SHA-256 of `raw`


def read_header(path: str | os.PathLike[str], *, file_index: int = 0) -> GgufHeader:
    """Read and check the header of the file at `path`; its tensors get `file=file_index`.

    Raises `ModelFormatError` for everything that can be wrong with the path or the file.
    """
    name = os.fspath(path)
    descriptor = open_regular(name)
    try:
        return _read(Cursor(name, descriptor), file_index)
    finally:
        os.close(descriptor)


def _read(cursor: Cursor, file_index: int) -> GgufHeader:
    version = _read_version(cursor)
    n_tensors = cursor.count("n_tensors", MAX_TENSORS, _MIN_TENSOR_BYTES)
    n_entries = cursor.count("n_kv", MAX_ENTRIES, MIN_ENTRY_BYTES)
    metadata = read_metadata(cursor, n_entries)
    alignment = alignment_of(metadata)
    entries = _read_tensor_entries(cursor, n_tensors, alignment)
    data_offset = -(-cursor.position // alignment) * alignment
    raw = cursor.buffer[: cursor.position]
    return GgufHeader(
        path=cursor.path,
        file_bytes=cursor.file_bytes,
        version=version,
        alignment=alignment,
        data_offset=data_offset,
        metadata=metadata,
        tensors=_placed(cursor, entries, data_offset, file_index),
        raw=raw,
        digest=hashlib.sha256(raw).digest(),
    )


def _read_version(cursor: Cursor) -> int:
    cursor.need(4, "magic")
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        raise cursor.error("magic", f"expected GGUF, found {magic!r}; this is not a GGUF file")
    cursor.position = 4
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    if version == 1:
        advice = "; convert the model again"
    elif int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
        advice = ": the file is big-endian; convert the model again as little-endian"
    else:
        advice = ""
    raise cursor.error("version", f"expected 2 or 3, found {version}{advice}", 4)


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """What the header says of a tensor; `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    n_bytes: int
    offset_at: int  # where in the header the offset stands


def _read_tensor_entries(cursor: Cursor, n_tensors: int, alignment: int) -> list[_TensorEntry]:
    entries: dict[str, _TensorEntry] = {}
    for index in range(n_tensors):
        start = cursor.position
        name = cursor.label(f"tensor {index} name", MAX_NAME_BYTES)
        if name in entries:
            raise cursor.error(name, "expected each tensor once, found it twice", start)
        shape = _read_shape(cursor, name)
        type_at = cursor.position
        kind = cursor.u32(f"{name}: type")
        if kind not in GGML_TYPES:
            raise cursor.error(name, f"expected a known ggml type, found {kind}", type_at)
        try:
            n_bytes = row_bytes(kind, shape[0])
        except ValueError as error:
            raise cursor.error(name, str(error), type_at) from error
        for size in shape[1:]:
            n_bytes *= size
        offset_at = cursor.position
        offset = cursor.u64(f"{name}: offset")
        if offset % alignment:
            raise cursor.error(
                name, f"expected an offset that {alignment} divides, found {offset}", offset_at
            )
        entries[name] = _TensorEntry(name, shape, kind, offset, n_bytes, offset_at)
    return list(entries.values())


def _read_shape(cursor: Cursor, name: str) -> tuple[int, ...]:
    start = cursor.position
    n_dimensions = cursor.u32(f"{name}: n_dims")
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise cursor.error(
            name, f"expected 1 to {MAX_DIMENSIONS} dimensions, found {n_dimensions}", start
        )
    start = cursor.position
    shape = tuple([cursor.u64(f"{name}: dimension {axis}") for axis in range(n_dimensions)])
    for axis, size in enumerate(shape):
        if not 1 <= size <= MAX_DIMENSION:
            raise cursor.error(
                name,
                f"dimension {axis}: expected 1 to {MAX_DIMENSION}, found {size}",
                start + 8 * axis,
            )
    return shape


def _placed(
    cursor: Cursor, entries: list[_TensorEntry], data_offset: int, file_index: int
) -> dict[str, TensorInfo]:
    """The tensors at their absolute offsets; none may reach past the file or into another."""
    for entry in entries:
        stop = data_offset + entry.offset + entry.n_bytes
        if stop > cursor.file_bytes:
            raise cursor.error(
                entry.name,
                f"expected data up to byte {stop}, found a file of {cursor.file_bytes} bytes; "
                "it is truncated or damaged, fetch it again",
                entry.offset_at,
            )
    for before, after in pairwise(sorted(entries, key=lambda entry: entry.offset)):
        if before.offset + before.n_bytes > after.offset:
            raise cursor.error(
                after.name,
                f"expected data of its own, found an overlap with {before.name}",
                after.offset_at,
            )
    return {
        entry.name: TensorInfo(
            entry.name,
            entry.shape,
            entry.type,
            file_index,
            data_offset + entry.offset,
            entry.n_bytes,
        )
        for entry in entries
    }
