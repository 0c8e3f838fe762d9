"""The corpus of bad GGUF files: each with a name, its bytes and what the refusal must say.

Every file is small; a claim in it may be large. Faults of sets, of experts and of paths, which need
more than one file's bytes, are tables in the tests of their modules.
"""

from bad_file import DATA, BadFile
from bad_gguf_tensors import bad_tensors
from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    array,
    entry,
    gguf,
    string,
    tensor_entry,
    u32,
    u64,
)


def bad_files() -> list[BadFile]:
    """The whole corpus, names unique."""
    return [
        *_preambles(),
        *_counts(),
        *_strings(),
        *_keys(),
        *_values(),
        *_arrays(),
        *_alignments(),
        *bad_tensors(),
    ]


def _preambles() -> list[BadFile]:
    whole = gguf([entry("a", U8, 1)])
    files = [
        BadFile("empty", b"", "magic: expected 4 bytes, found 0", 0),
        *[
            BadFile(f"only-{n}-bytes", whole[:n], "before the file ends")
            for n in (1, 3, 4, 7, 8, 15, 16, 23)
        ],
        BadFile("magic-other", gguf(magic=b"GGML"), "magic: expected GGUF, found b'GGML'", 0),
        BadFile("magic-lower-case", gguf(magic=b"gguf"), "magic: expected GGUF", 0),
        BadFile("magic-reversed", gguf(magic=b"FUGG"), "magic: expected GGUF", 0),
        BadFile("magic-zeros", bytes(64), "magic: expected GGUF", 0),
        BadFile("magic-terminal-codes", b"\x1b[2J" + bytes(60), "found b'\\x1b[2J'", 0),
        BadFile("a-text", b"# Model card\nThis is not a model\n", "this is not a GGUF file", 0),
        BadFile("a-zip", b"PK\x03\x04" + bytes(60), "this is not a GGUF file", 0),
    ]
    for version, fragment in (
        (0, "version: expected 2 or 3, found 0"),
        (1, "found 1; convert the model again"),
        (4, "version: expected 2 or 3, found 4"),
        (0x03000000, "big-endian"),
        (0x02000000, "big-endian"),
        (2**32 - 1, "found 4294967295"),
    ):
        files.append(BadFile(f"version-{version:#x}", gguf(version=version), fragment, 4))
    return files


def _counts() -> list[BadFile]:
    files = []
    for count in (2**17, 2**31, 2**32, 2**40, 2**63, 2**64 - 1):
        files += [
            BadFile(f"n-tensors-{count}", gguf(n_tensors=count), "n_tensors: expected at most", 8),
            BadFile(f"n-kv-{count}", gguf(n_entries=count), "n_kv: expected at most", 16),
        ]
    tensor, key = tensor_entry("t", (8,)), entry("a", U8, 1)
    return [
        *files,
        BadFile("n-tensors-over-file", gguf(n_tensors=99_999), "n_tensors: found 99999", 8),
        BadFile("n-kv-over-file", gguf(n_entries=65_536), "n_kv: found 65536", 16),
        BadFile("n-kv-one-more", gguf([key], n_entries=2, alignment=1), "n_kv: found 2", 16),
        BadFile("n-kv-one-more-padded", gguf([key], n_entries=2, data=DATA), "key 1", 38),
        BadFile("n-kv-one-less", gguf([key] * 2, n_entries=1, n_tensors=1, data=DATA), "dimension"),
        BadFile("n-tensors-one-more", gguf([], [tensor], DATA, n_tensors=2), "tensor 1 name", 57),
        BadFile(
            "counts-exchanged", gguf([key], n_entries=0, n_tensors=1, data=DATA), "found 0", 33
        ),
    ]


def _strings() -> list[BadFile]:
    files = []
    for length in (2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, 2**64 - 8):
        raw = string("a", length=length) + u32(U8) + b"\1" + DATA
        files.append(BadFile(f"key-length-{length}", gguf([raw]), "key 0: expected a string", 24))
    for length in (2**24 + 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 2**64 - 37):
        raw = string("general.name") + u32(STRING) + string("x", length=length)
        files.append(
            BadFile(f"string-length-{length}", gguf([raw], data=DATA), "general.name: expected", 48)
        )
        raw = entry("tokens", ARRAY, array(STRING, ["a"]) + string("b", length=length))
        raw = raw.replace(array(STRING, ["a"]), array(STRING, ["a"], count=2))
        files.append(
            BadFile(f"token-length-{length}", gguf([raw], data=DATA), "tokens[1]: expected a")
        )
    past = string("k") + u32(STRING) + string("x", length=2)
    return [
        *files,
        BadFile("string-past-end", gguf([past], alignment=1), "k: expected 2 bytes, found 1", 45),
        BadFile(
            "string-16-mib-claimed",
            gguf([string("k") + u32(STRING) + string("x", length=2**24)]),
            "k: expected 16777216 bytes",
        ),
        BadFile(
            "token-past-end",
            gguf(
                [entry("t", ARRAY, u32(STRING) + u64(2) + string("a") + string("b", length=9))],
                alignment=1,
            ),
            "t[1]: expected 9 bytes",
        ),
    ]


def _keys() -> list[BadFile]:
    one = entry("twice", U8, 1)
    many = [entry(f"key{index}", U8, 1) for index in range(3000)]
    odd = {
        "invalid-utf8": b"gen\xfferal",
        "cut-utf8": b"caf\xc3",
        "overlong-utf8": b"\xc0\xaf",
        "surrogate": b"\xed\xa0\x80",
        "nul": b"a\0b",
        "newline": b"a\nERROR all is well",
        "escape-codes": b"\x1b[31mred\x1b[0m",
        "carriage-return": b"a\rb",
        "right-to-left": "a\u202eb".encode(),
        "line-separator": "a\u2028b".encode(),
        "delete": b"a\x7fb",
    }
    files = [
        BadFile(
            f"key-{name}",
            gguf([entry(raw, U8, 1)]),
            "UTF-8"
            if name in ("invalid-utf8", "cut-utf8", "overlong-utf8", "surrogate")
            else "prin",
        )
        for name, raw in odd.items()
    ]
    return [
        *files,
        BadFile("key-empty", gguf([entry("", U8, 1)]), "key 0: expected printable text", 24),
        BadFile("key-twice", gguf([one, one]), "twice: expected each key once", 42),
        BadFile("key-twice-other-type", gguf([one, entry("twice", U32, 1)]), "each key once", 42),
        BadFile("key-twice-of-3000", gguf([*many, many[7]]), "key7: expected each key once"),
        BadFile("key-10-to-the-5", gguf([one] * 100_000), "n_kv: expected at most 65536", 16),
        BadFile("key-without-type", gguf([string("k")], n_entries=1, alignment=1), "n_kv: found 1"),
    ]


def _values() -> list[BadFile]:
    files = [
        BadFile(f"value-type-{kind}", gguf([entry("k", kind, bytes(64))]), "value type 0..12", 33)
        for kind in (13, 14, 255, 256, 2**31, 2**32 - 1)
    ]
    for kind in (U8, I8, U16, U32, I32, F32, U64, I64, F64, BOOL, STRING, ARRAY):
        cut = gguf([string("long-enough") + u32(kind)], alignment=1)
        files.append(BadFile(f"value-missing-{kind}", cut, "long-enough"))
    return [
        *files,
        BadFile("bool-2", gguf([entry("flag", BOOL, b"\2")]), "flag: expected a bool", 40),
        BadFile("bool-255", gguf([entry("flag", BOOL, b"\xff")]), "flag: expected a bool", 40),
        BadFile(
            "string-invalid-utf8", gguf([entry("k", STRING, b"ab\xfe")]), "k: expected UTF-8", 47
        ),
        BadFile("string-cut-utf8", gguf([entry("k", STRING, b"ab\xe2\x82")]), "expected UTF-8", 47),
    ]


def _arrays() -> list[BadFile]:
    def claims(kind: int, count: int) -> bytes:
        return gguf([entry("list", ARRAY, u32(kind) + u64(count) + bytes(64))], data=DATA)

    files = []
    for kind in (U8, F32, BOOL, STRING, F64):
        for count in (2**24, 2**31, 2**40, 2**63, 2**64 - 1):
            files.append(
                BadFile(f"array-{kind}-of-{count}", claims(kind, count), "list: length", 44)
            )
        files.append(
            BadFile(f"array-{kind}-over-file", claims(kind, 2**20), "list: length: found", 44)
        )
    for kind in (13, 255, 2**32 - 1):
        files.append(
            BadFile(f"array-of-type-{kind}", claims(kind, 1), "list: expected an element type", 40)
        )
    half = 2**21 + 1
    for depth in (1, 2, 100_000):
        nested = (u32(ARRAY) + u64(1)) * depth + u32(U8) + u64(0)
        files.append(
            BadFile(f"array-nested-{depth}", gguf([entry("n", ARRAY, nested)]), "found arrays", 37)
        )
    return [
        *files,
        BadFile(
            "array-bool-3",
            gguf([entry("b", ARRAY, array(U8, [1, 3]).replace(u32(U8), u32(7), 1))]),
            "a bool",
            50,
        ),
        BadFile(
            "array-utf8",
            gguf([entry("t", ARRAY, array(STRING, [b"a", b"\xff"]))]),
            "t[1]: expected UTF-8",
            66,
        ),
        BadFile(
            "array-without-type",
            gguf([entry("k", ARRAY, b"")], alignment=1),
            "n_kv: found 1",
        ),
        BadFile(
            "arrays-too-long-together",
            gguf([entry(key, ARRAY, u32(U8) + u64(half) + bytes(half)) for key in "ab"]),
            "b: length: expected at most",
        ),
    ]


def _alignments() -> list[BadFile]:
    files = [
        BadFile(
            f"alignment-{value}",
            gguf([entry("general.alignment", U32, value)], [tensor_entry("t", (8,))], DATA),
            f"general.alignment: expected a power of two, 8 to 65536, found {value}",
            53,
        )
        for value in (0, 1, 2, 4, 7, 13, 33, 48, 65_537, 2**17, 2**31, 2**32 - 1)
    ]
    for kind, content in (
        (U64, 32),
        (I32, 32),
        (U8, 32),
        (F32, 32.0),
        (STRING, "32"),
        (BOOL, True),
    ):
        files.append(
            BadFile(
                f"alignment-of-type-{kind}",
                gguf([entry("general.alignment", kind, content)], data=DATA),
                "general.alignment: expected value type 4",
                49,
            )
        )
    as_array = entry("general.alignment", ARRAY, array(U32, [32]))
    return [*files, BadFile("alignment-array", gguf([as_array]), "expected value type 4", 49)]
