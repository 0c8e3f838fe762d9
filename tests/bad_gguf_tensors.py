"""The part of the corpus of bad GGUF files that is about tensor entries."""

from bad_file import DATA, BadFile
from gguf_bytes import U32, entry, gguf, tensor_entry


def bad_tensors() -> list[BadFile]:
    """Faults of the tensor entries: names, shapes, types, places."""
    return [*_names(), *_shapes(), *_types(), *_places()]


def _names() -> list[BadFile]:
    def named(*names: str | bytes) -> bytes:
        tensors = [tensor_entry(name, (8,), 0, 32 * i) for i, name in enumerate(names)]
        return gguf([], tensors, DATA)

    return [
        BadFile("name-empty", named(""), "tensor 0 name: expected printable text", 24),
        BadFile("name-64-bytes", named("n" * 64), "tensor 0 name: expected a string of at most 63"),
        BadFile("name-invalid-utf8", named(b"blk\xff"), "tensor 0 name: expected UTF-8", 35),
        BadFile("name-nul", named("output.weight\0.evil"), "output.weight\\x00.evil", 24),
        BadFile("name-newline", named("a\nb"), "expected printable text", 24),
        BadFile("name-escape-codes", named("\x1b]0;title\x07"), "\\x1b]0;title\\x07", 24),
        BadFile("name-twice", named("a", "b", "a"), "a: expected each tensor once", 90),
        BadFile(
            "name-twice-of-2000",
            named(*[f"t{index % 1999}" for index in range(2000)]),
            "t0: expected each tensor once",
        ),
    ]


def _shapes() -> list[BadFile]:
    files = []
    for n_dims in (0, 5, 6, 2**31, 2**32 - 1):
        raw = tensor_entry("t", (1,) * min(n_dims, 6), n_dims=n_dims)
        files.append(
            BadFile(f"n-dims-{n_dims}", gguf([], [raw], DATA), f"dimensions, found {n_dims}", 33)
        )
    for size in (0, 2**40 + 1, 2**62, 2**63, 2**64 - 1):
        for axis in range(3):
            shape = [8, 8, 8]
            shape[axis] = size
            files.append(
                BadFile(
                    f"dimension-{axis}-{size}",
                    gguf([], [tensor_entry("t", shape)], DATA),
                    f"t: dimension {axis}: expected 1 to",
                    37 + 8 * axis,
                )
            )
    for name, sizes in {
        "wraps-64-to-0": (2**32, 2**32),
        "wraps-64-to-8": (2**33, 2**33, 2**2, 2),
        "wraps-with-type-size": (2**40, 2**22),
        "wraps-32": (2**16, 2**16, 1, 1),
        "largest": (2**40,) * 4,
    }.items():
        files.append(
            BadFile(
                f"product-{name}", gguf([], [tensor_entry("t", sizes)], DATA), "t: expected data"
            )
        )
    return files


def _types() -> list[BadFile]:
    def typed(kind: int, *shape: int) -> bytes:
        return gguf([], [tensor_entry("t", shape, kind)], DATA)

    unknown = (4, 5, 31, 32, 33, 36, 37, 38, 42, 255, 2**31, 2**32 - 1)
    return [
        *[
            BadFile(f"type-{kind}", typed(kind, 256), f"known ggml type, found {kind}", 45)
            for kind in unknown
        ],
        BadFile("row-q4-0-of-31", typed(2, 31, 32), "multiple of 32 elements, found 31", 53),
        BadFile("row-q8-0-of-33", typed(8, 33), "multiple of 32 elements, found 33", 45),
        BadFile("row-q4-k-of-32", typed(12, 32, 8), "multiple of 256 elements, found 32", 53),
        BadFile("row-q6-k-of-1", typed(14, 1, 256), "multiple of 256 elements, found 1", 53),
        BadFile("row-mxfp4-of-48", typed(39, 48), "multiple of 32 elements, found 48", 45),
    ]


def _places() -> list[BadFile]:
    def placed(*places: tuple[int, int], data: bytes = DATA, alignment: int = 32) -> bytes:
        """Tensors of n F32 elements at an offset."""
        tensors = [
            tensor_entry(f"t{index}", (n,), 0, offset) for index, (n, offset) in enumerate(places)
        ]
        keys = [entry("general.alignment", U32, alignment)] if alignment != 32 else []
        return gguf(keys, tensors, data, alignment=alignment)

    files = [
        BadFile(f"offset-{offset}", placed((8, offset)), "t0: expected an offset that 32", 50)
        for offset in (1, 8, 16, 33, 2**63 + 1, 2**64 - 1)
    ]
    for offset in (4096, 2**20, 2**32, 2**62, 2**63, 2**64 - 32):
        files.append(
            BadFile(f"offset-{offset}-past-end", placed((8, offset)), "t0: expected data", 50)
        )
    return [
        *files,
        BadFile(
            "offset-of-other-alignment", placed((8, 32), alignment=64), "that 64 divides, found 32"
        ),
        BadFile("no-data", placed((8, 0), data=b""), "truncated or damaged", 50),
        BadFile("one-byte-short", placed((8, 0), data=bytes(31)), "found a file of 95 bytes", 50),
        BadFile(
            "last-one-byte-short", placed((8, 0), (8, 32), data=bytes(63)), "t1: expected data"
        ),
        BadFile("first-past-end", placed((2048, 0), (8, 0)), "t0: expected data"),
        BadFile("offset-plus-size-wraps", placed((2**40, 2**64 - 2**42)), "t0: expected data", 50),
        BadFile("overlap-same-place", placed((8, 0), (8, 0)), "t1: expected data of its own"),
        BadFile("overlap-first-longer", placed((16, 0), (8, 32)), "found an overlap with t0"),
        BadFile("overlap-in-other-order", placed((8, 32), (16, 0)), "t0: expected data of its own"),
        BadFile("overlap-inside", placed((64, 0), (8, 96)), "t1: expected data of its own"),
        BadFile("overlap-one-byte", placed((9, 0), (8, 32)), "t1: expected data of its own"),
        BadFile(
            "overlap-third", placed((8, 0), (40, 64), (8, 32), (8, 192)), "found an overlap with t1"
        ),
    ]
