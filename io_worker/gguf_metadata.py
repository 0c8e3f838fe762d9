"""The keys and values of a GGUF header.

    key string | value type u32 | value           value type 0..12
    an array value: element type u32 | length u64 | elements without gaps

All little-endian; a string is a u64 length and UTF-8 bytes. Source: docs/gguf.md of ggml. Arrays of
arrays are in the format but in no real file, and are refused.

Keys must be printable. String values may hold any UTF-8, newlines and control characters too, as
tokens and templates do: who prints one escapes it. No key has a meaning here but
`general.alignment`.
"""

import struct

from io_worker.model_bytes import MAX_STRING_BYTES, Cursor

MAX_KEY_BYTES = 65_535  # docs/gguf.md
MAX_ENTRIES = 65_536
MAX_ARRAY_ELEMENTS = 1 << 22  # of all arrays together; the largest vocabularies come to 1.3 million
DEFAULT_ALIGNMENT = 32
# docs/gguf.md asks for a multiple of 8, so 1, 2 and 4 are refused although llama.cpp takes them.
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 65_536
MIN_ENTRY_BYTES = 8 + 1 + 4 + 1  # a one-letter key and a one-byte value

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_U32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_LENGTH = struct.Struct("<Q")
_MIN_STRING_BYTES = 8


def alignment_of(metadata: dict[str, object]) -> int:
    """The alignment of the tensor data in bytes, as checked when the metadata were read."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    assert isinstance(alignment, int)
    return alignment


def read_metadata(cursor: Cursor, n_entries: int) -> dict[str, object]:
    """Read `n_entries` keys with their values: int, float, bool, str, or a list of one of these.

    Leaves the cursor at the first byte behind them. Raises `ModelFormatError`.
    """
    metadata: dict[str, object] = {}
    n_elements = 0
    for index in range(n_entries):
        start = cursor.position
        key = cursor.label(f"key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(key, "expected each key once, found it twice", start)
        kind_at = cursor.position
        kind = cursor.u32(f"{key}: value type")
        if key == "general.alignment":
            value: object = _read_alignment(cursor, kind, kind_at)
        elif kind == _ARRAY:
            array = _read_array(cursor, key, MAX_ARRAY_ELEMENTS - n_elements)
            n_elements += len(array)
            value = array
        elif kind == _STRING:
            value = cursor.string(key)
        elif kind == _BOOL or kind in _SCALARS:
            value = _read_numbers(cursor, key, kind, 1)[0]
        else:
            raise cursor.error(key, f"expected a value type 0..12, found {kind}", kind_at)
        metadata[key] = value
    return metadata


def _read_alignment(cursor: Cursor, kind: int, kind_at: int) -> int:
    key = "general.alignment"
    if kind != _U32:
        raise cursor.error(key, f"expected value type {_U32} (uint32), found {kind}", kind_at)
    value_at = cursor.position
    alignment = cursor.u32(key)
    if not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(
            key,
            f"expected a power of two, {MIN_ALIGNMENT} to {MAX_ALIGNMENT}, found {alignment}",
            value_at,
        )
    return alignment


def _read_array(cursor: Cursor, key: str, max_elements: int) -> list[object]:
    start = cursor.position
    kind = cursor.u32(f"{key}: element type")
    if kind == _ARRAY:
        raise cursor.error(key, "expected an array of scalars or strings, found arrays", start)
    if kind == _STRING:
        min_element_bytes = _MIN_STRING_BYTES
    elif kind == _BOOL or kind in _SCALARS:
        min_element_bytes = struct.calcsize("<" + _SCALARS.get(kind, "B"))
    else:
        raise cursor.error(key, f"expected an element type 0..12, found {kind}", start)
    count = cursor.count(f"{key}: length", max_elements, min_element_bytes)
    if kind == _STRING:
        return _read_strings(cursor, key, count)
    return _read_numbers(cursor, key, kind, count)


def _read_numbers(cursor: Cursor, key: str, kind: int, count: int) -> list[object]:
    layout = struct.Struct(f"<{count}{_SCALARS.get(kind, 'B')}")
    cursor.need(layout.size, key)
    start = cursor.position
    numbers: list[object] = list(layout.unpack_from(cursor.buffer, start))
    cursor.position += layout.size
    if kind != _BOOL:
        return numbers
    for index, number in enumerate(numbers):
        if number not in (0, 1):
            raise cursor.error(key, f"expected a bool, 0 or 1, found {number}", start + index)
    return [number == 1 for number in numbers]


def _read_strings(cursor: Cursor, key: str, count: int) -> list[object]:
    """The strings of an array. A vocabulary has 150,000, so the common case is a tight loop.

    The loop stops at whatever it cannot take: the end of the buffer, a long string, bad UTF-8.
    `Cursor.string` then reads that one string with all checks and the exact error.
    """
    strings: list[object] = []
    length_at = _LENGTH.unpack_from
    while len(strings) < count:
        strings.append(cursor.string(f"{key}[{len(strings)}]"))
        buffer, position = cursor.buffer, cursor.position
        stop_at = len(buffer) - _MIN_STRING_BYTES
        try:
            for _ in range(count - len(strings)):
                if position > stop_at:
                    break
                start = position + _MIN_STRING_BYTES
                stop = start + length_at(buffer, position)[0]
                if stop > len(buffer) or stop - start > MAX_STRING_BYTES:
                    break
                strings.append(buffer[start:stop].decode())
                position = stop
        except UnicodeDecodeError:
            pass  # `position` is still before the bad string, which is read again above
        cursor.position = position
    return strings
