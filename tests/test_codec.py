"""What the codec lets through, and that everything else is one kind of error."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import pytest

from shm.codec import (
    MAX_INTEGER,
    MAX_MESSAGE_BYTES,
    MessageError,
    decoder_for,
    pack,
    unpack,
)


@dataclass(frozen=True, slots=True)
class Inner:
    number: int
    text: str


class Record(NamedTuple):
    first: int
    second: int


class Mixed(NamedTuple):
    record: Record
    text: str


@dataclass(frozen=True, slots=True)
class Outer:
    numbers: tuple[int, ...]
    pair: tuple[int, str]
    inner: Inner
    many: tuple[Inner, ...]
    maybe: Inner | None
    real: float
    flag: bool
    data: bytes
    records: tuple[Record, ...]
    mixed: tuple[Mixed, ...]


@dataclass(frozen=True, slots=True)
class Single:
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Empty:
    pass


VALUE = Outer(
    (1, 2), (3, "x"), Inner(4, "ä"), (Inner(5, ""),), None, 0.5, True, b"\0\xff",
    (Record(6, 7), Record(8, MAX_INTEGER)), (Mixed(Record(9, 0), "z"),),
)  # fmt: skip
FIELDS = [
    [1, 2], [3, "x"], [4, "ä"], [[5, ""]], None, 0.5, True, b"\0\xff",
    [[6, 7], [8, MAX_INTEGER]], [[[9, 0], "z"]],
]  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [VALUE, Single(()), Single((1,)), Empty(), Inner(MAX_INTEGER, "\0")],
    ids=lambda value: type(value).__name__,
)
def test_there_and_back(value: Any) -> None:
    tag, fields = unpack(pack("Tag", value))
    assert tag == "Tag"
    found = decoder_for(type(value))(fields)
    assert found == value
    assert repr(found) == repr(value)  # a named tuple equals a plain one


def test_the_layout_on_the_wire() -> None:
    assert msgpack.unpackb(pack("Tag", VALUE)) == ["Tag", *FIELDS]


@pytest.mark.parametrize(
    ("position", "wrong"),
    [
        (0, None), (0, 1), (0, [1, "2"]), (0, [-1]), (0, [MAX_INTEGER + 1]), (0, [True]),
        (0, [1.0]), (0, {"a": 1}), (0, "ab"),
        (1, [3]), (1, [3, "x", 1]), (1, ["x", 3]), (1, 3),
        (2, [4]), (2, [4, "a", 1]), (2, [4, b"a"]), (2, [True, "a"]), (2, None),
        (3, [[5]]), (3, [5]), (3, None),
        (4, []), (4, [1]), (4, False),
        (5, 1), (5, "0.5"), (5, None), (5, True),
        (6, 1), (6, None), (6, 0.0),
        (7, "text"), (7, None), (7, [1]),
        (8, None), (8, [6, 7]), (8, [[6]]), (8, [[6, 7], [8]]), (8, [[6, 7, 8]]), (8, ["67"]),
        (8, [[6, 7], [8, True]]), (8, [[6, -7]]), (8, [[6, 7], [MAX_INTEGER + 1, 0]]),
        (8, [[6, 7.0]]), (8, [[6, 7], None]), (8, "67"), (8, [{"first": 6}]),
        (9, [[9, "z"]]), (9, [[[9], "z"]]), (9, [[[9, 0]]]), (9, [[[9, "0"], "z"]]),
    ],
)  # fmt: skip
def test_a_wrong_field_names_itself(position: int, wrong: Any) -> None:
    fields = [*FIELDS]
    fields[position] = wrong
    with pytest.raises(MessageError) as caught:
        decoder_for(Outer)(fields)
    assert "expected" in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("fields", [[], FIELDS[:-1], [*FIELDS, 1], None, "x", {}])
def test_a_wrong_number_of_fields(fields: Any) -> None:
    with pytest.raises(MessageError, match="expected 10 fields"):
        decoder_for(Outer)(fields)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",  # never used
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32
        b"\xdf\xff\xff\xff\xff",  # a map of 2^32
        b"\xdb\xff\xff\xff\xff",  # a text of 2^32
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000 + b"\xc0",  # nested
        b"\x92\xa1A\xc7\xff\x01",  # an extension type
        b"\xa1A",  # no array
        b"\x90",  # no tag
        b"\x91\x01",  # a tag that is no text
        b"\x91\xa1\xff",  # no UTF-8
        pack("Tag", VALUE) + b"\0",  # more behind it
        pack("Tag", VALUE)[:-1],
        bytes(MAX_MESSAGE_BYTES + 1),
        msgpack.packb(["Tag", {1: 2}]),
    ],
    ids=range(16),
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(MessageError):
        unpack(data)


def test_a_declaration_that_the_codec_cannot_carry() -> None:
    @dataclass
    class Odd:
        values: dict[str, int]

    with pytest.raises(TypeError, match=r"Odd\.values"):
        decoder_for(Odd)


def test_text_that_is_no_unicode_still_travels() -> None:
    """Names of files may hold any bytes; an error that names one must arrive."""
    _, fields = unpack(pack("Tag", Inner(1, "model\udcff.gguf")))
    assert fields == [1, "model\\udcff.gguf"]
