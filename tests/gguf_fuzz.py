"""Seeded mutation of GGUF files: every mutant is read or refused, and what is read is right.

A mutant that gives another exception than `ModelFormatError`, takes longer than the limit, or is
accepted although its tensors break the reader's promises, is a finding. The same seed gives the
same mutants, so that a finding is repeated by its number.
"""

import random
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U16,
    U32,
    U64,
    array,
    entry,
    gguf,
    tensor_entry,
)

from io_worker.ggml_types import row_bytes
from io_worker.gguf_header import GgufHeader, ModelFormatError
from io_worker.model_file import Model
from io_worker.slabs import slab_table

LIMIT_SECONDS = 1.0  # of processor time; usual is below a millisecond
_HEADER_BYTES = 448  # the headers of the seeds are 352 to 448 bytes long
_EDGES = [0, 1, 2, 4, 7, 8, 9, 12, 13, 31, 32, 63, 64, 255, 256, 65_535, 2**24]
_EDGES += [2**bits + step for bits in (31, 32, 40, 62, 63) for step in (-1, 0, 1)]
_EDGES += [2**64 - 2**bits for bits in (0, 1, 3, 5, 32)]


@dataclass(frozen=True, slots=True)
class Seed:
    """A good file, and the places in its header where an integer seems to stand."""

    content: bytes
    integers: tuple[int, ...]


def seeds() -> list[Seed]:
    """Small files that between them have everything the reader knows."""
    entries = [
        entry("general.architecture", STRING, "olmoe"),
        entry("general.alignment", U32, 32),
        entry("u16", U16, 7),
        entry("flag", BOOL, True),
        entry("u64", U64, 2**40),
        entry("tokens", ARRAY, array(STRING, ["<s>", "é", "", "Ġthe", "\n"])),
        entry("scores", ARRAY, array(F32, [0.0, -1.0, 2.5])),
        entry("flags", ARRAY, array(BOOL, [True, False])),
    ]
    tensors = [
        tensor_entry("a", (32, 2), 8, 0),
        tensor_entry("b", (8,), 0, 96),
        tensor_entry("c", (2, 2, 2), 0, 128),
    ]
    contents = [gguf(entries, tensors, bytes(192)), _experts(32, 0, 4, 8), _experts(64, 8, 32, 32)]
    return [Seed(content, _integers(content)) for content in contents]


def _integers(content: bytes) -> tuple[int, ...]:
    return tuple(
        [at for at in range(_HEADER_BYTES) if content[at] and content[at + 1 : at + 4] == bytes(3)]
    )


def _experts(alignment: int, kind: int, width: int, expert_width: int) -> bytes:
    """A layer of 4 experts."""
    entries = [
        entry("olmoe.expert_count", U32, 4),
        entry("general.alignment", U32, alignment),
        entry("kinds", ARRAY, array(I32, [1, 2, 3])),
    ]
    shapes = {
        "gate": (width, expert_width, 4),
        "up": (width, expert_width, 4),
        "down": (expert_width, width, 4),
    }
    n_bytes = 4 * expert_width * row_bytes(kind, width)
    step = -(-n_bytes // alignment) * alignment
    tensors = [
        tensor_entry(f"blk.0.ffn_{role}_exps.weight", shape, kind, step * index)
        for index, (role, shape) in enumerate(shapes.items())
    ]
    return gguf(entries, tensors, bytes(3 * step), alignment=alignment)


def mutant(originals: Sequence[Seed], rng: random.Random) -> bytes:
    """One to four changes to one of the originals, most of them in its header."""
    original = rng.choice(originals)
    content = bytearray(original.content)
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        at = rng.choice((rng.randrange(_HEADER_BYTES), rng.choice(original.integers)))
        change = rng.randrange(9)
        if change == 0:
            content[at : at + 1] = bytes([rng.randrange(256)])
        elif change == 1 and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif change == 2:
            content[at : at + 8] = struct.pack("<Q", rng.choice(_EDGES))
        elif change == 3:
            content[at : at + 4] = struct.pack("<I", rng.choice(_EDGES) % 2**32)
        elif change == 4:
            content[at : at + 8] = struct.pack("<Q", rng.randrange(len(content) + 64))
        elif change == 5:
            del content[at : at + rng.randrange(1, 40)]
        elif change == 6:
            content[at:at] = content[at : at + rng.randrange(1, 80)]
        elif change == 7:
            content[at : at + 32] = rng.choice(originals).content[at : at + 32]
        else:
            del content[rng.randrange(len(content) + 1) :]
    return bytes(content)


@dataclass(frozen=True, slots=True)
class Finding:
    """A mutant that the reader did not stand, by its number in the run."""

    number: int
    fault: str
    content: bytes


@dataclass(slots=True)
class Tally:
    """What became of the mutants of a run."""

    n_refused: int
    n_accepted: int
    findings: list[Finding]


def fuzz(
    read: Callable[[Path], GgufHeader],
    path: Path,
    originals: Sequence[Seed],
    *,
    n_mutants: int,
    seed: int,
    limit_seconds: float = LIMIT_SECONDS,
    stop_at_first: bool = False,
) -> Tally:
    """Write each mutant to `path` and read it."""
    rng = random.Random(seed)
    tally = Tally(0, 0, [])
    for number in range(n_mutants):
        content = mutant(originals, rng)
        path.write_bytes(content)
        started = time.process_time()
        fault = None
        try:
            header = read(path)
            fault = broken_promise(header, len(content))
            tally.n_accepted += 1
        except ModelFormatError as error:
            tally.n_refused += 1
            if not str(error).isprintable():
                fault = "the message is not one printable line"
        except Exception as error:  # any other class is what the fuzzer looks for
            fault = f"{type(error).__name__}: {error}"
        if time.process_time() - started > limit_seconds:
            fault = f"took longer than {limit_seconds} s"
        if fault is not None:
            tally.findings.append(Finding(number, fault, content))
            if stop_at_first:
                break
    return tally


def broken_promise(header: GgufHeader, file_bytes: int) -> str | None:
    """The first promise of the reader that an accepted header does not keep."""
    end = 0
    for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < max(end, header.data_offset):
            return f"{tensor.name} overlaps"
        end = tensor.offset + tensor.n_bytes
        if tensor.n_bytes < 1 or end > file_bytes:
            return f"{tensor.name} does not lie in the file"
        if (tensor.offset - header.data_offset) % header.alignment:
            return f"{tensor.name} is not aligned"
        if not tensor.name.isprintable() or not 1 <= len(tensor.name.encode()) <= 63:
            return "a name is not printable"
    if not 8 <= header.alignment <= 65_536 or header.alignment & (header.alignment - 1):
        return f"alignment {header.alignment}"
    if not all(key.isprintable() for key in header.metadata):
        return "a key is not printable"
    return _broken_slabs(header, file_bytes)


def _broken_slabs(header: GgufHeader, file_bytes: int) -> str | None:
    model = Model((header.path,), (file_bytes,), header.metadata, header.tensors, "")
    try:
        table = slab_table(model, [0], 4)
    except ModelFormatError:
        return None
    for expert in range(4):
        for place in table.layers[0].ranges(expert):
            if place.n_bytes < 1 or place.offset + place.n_bytes > file_bytes:
                return f"expert {expert} does not lie in the file"
    return None
