"""The bytes of GGUF files for tests, piece by piece, with any field wrong.

Nothing is checked here, so that every fault of a file can be made. Whole models that are right are
made by `gguf_builder`.
"""

import struct
from collections.abc import Iterable, Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_SCALARS = dict(
    zip((U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64), "BbHhIif?Qqd", strict=True)
)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes, *, length: int | None = None) -> bytes:
    """A GGUF string; `length` claims another length than the text has."""
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw) if length is None else length) + raw


def value(kind: int, content: object) -> bytes:
    """One scalar or string without its type."""
    if kind == STRING:
        assert isinstance(content, str | bytes)
        return string(content)
    return struct.pack("<" + _SCALARS[kind], content)


def array(kind: int, contents: Iterable[object], *, count: int | None = None) -> bytes:
    """The value of an array entry; `count` claims another number of elements."""
    items = [value(kind, item) for item in contents]
    return u32(kind) + u64(len(items) if count is None else count) + b"".join(items)


def entry(key: str | bytes, kind: int, content: object) -> bytes:
    """One key with its value; ARRAY takes the bytes of `array`, an unknown kind raw bytes."""
    raw = content if isinstance(content, bytes) and kind != STRING else value(kind, content)
    return string(key) + u32(kind) + raw


def tensor_entry(
    name: str | bytes,
    shape: Sequence[int],
    kind: int = 0,
    offset: int = 0,
    *,
    n_dims: int | None = None,
) -> bytes:
    """One tensor of the header; `shape` innermost first, `offset` from the start of the data."""
    count = len(shape) if n_dims is None else n_dims
    return string(name) + u32(count) + b"".join(map(u64, shape)) + u32(kind) + u64(offset)


def gguf(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    n_entries: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A whole file. `alignment` pads the header, it writes no key; the counts may be wrong."""
    header = magic + u32(version)
    header += u64(len(tensors) if n_tensors is None else n_tensors)
    header += u64(len(entries) if n_entries is None else n_entries)
    header += b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data
