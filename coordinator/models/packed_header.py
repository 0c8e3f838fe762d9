"""Lays a packed file out: its header, and where each range of each unit goes (`packed_layout`).

Keys are copied from the source byte by byte, so their types stay; those that say how the source was
split or aligned go. The layout is a function of the source's header alone.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from io_worker.gguf_metadata import read_metadata
from io_worker.model_bytes import Cursor, open_regular
from io_worker.model_file import Model
from io_worker.model_units import Unit, units_of
from io_worker.packed_layout import (
    CHECKSUM_BYTES,
    CHECKSUMS_AT,
    CHECKSUMS_KEY,
    FINGERPRINT_KEY,
    KEY_PREFIX,
    ROLES,
    VERSION,
    VERSION_KEY,
    expert_name,
)
from io_worker.slabs import SlabTable
from shm.pool import ALIGNMENT, align_up

START = b"GGUF" + struct.pack("<I", 3)  # magic and version
DROPPED_KEYS = ("split.", "general.alignment", KEY_PREFIX)
_COUNTS_AT = 8  # tensors, then keys: u64 each
_U32, _U64, _STRING, _ARRAY = 4, 10, 8, 9  # value types


@dataclass(frozen=True, slots=True)
class PackedFile:
    """What is to be written. `units` are those of the source; `places` where their ranges go."""

    header: bytes  # checksums are 0; not padded
    units: tuple[Unit, ...]
    places: tuple[tuple[int, ...], ...]
    total_bytes: int

    @property
    def n_checksums(self) -> int:
        """Of the header and of every unit."""
        return 1 + len(self.units)

    @property
    def checksums_stop(self) -> int:
        """The byte behind the last checksum."""
        return CHECKSUMS_AT + self.n_checksums * CHECKSUM_BYTES


def packed_file(model: Model, slabs: SlabTable) -> PackedFile:
    """The layout of the packed file of a model that is not packed."""
    units = units_of(model, slabs)
    named = list(_named(model, slabs))
    kept = _kept_entries(model.paths[0])
    own = (
        _string("general.alignment") + struct.pack("<II", _U32, ALIGNMENT),
        _string(VERSION_KEY) + struct.pack("<II", _U32, VERSION),
        _string(FINGERPRINT_KEY) + struct.pack("<I", _STRING) + _string(model.fingerprint),
    )
    n_checksums = 1 + len(units)
    checksums = _string(CHECKSUMS_KEY) + struct.pack("<IIQ", _ARRAY, _U64, n_checksums)
    entries = [checksums, bytes(n_checksums * CHECKSUM_BYTES), *kept, *own]
    offsets, tensors, data_bytes = [], [], 0
    for name, shape, kind, n_bytes in named:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        tensors.append(_string(name) + dims + struct.pack("<IQ", kind, data_bytes))
        offsets.append(data_bytes)
        data_bytes += align_up(n_bytes)
    counts = struct.pack("<QQ", len(named), 1 + len(kept) + len(own))
    header = b"".join((START, counts, *entries, *tensors))
    data_start = align_up(len(header))
    starts = iter(offsets)
    places = tuple(tuple(data_start + next(starts) for _ in unit.ranges) for unit in units)
    return PackedFile(header, tuple(units), places, data_start + data_bytes)


def _named(model: Model, slabs: SlabTable) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Name, shape, type and bytes of every tensor of the packed file, in the order of the units."""
    experts = {f"blk.{x.layer}.ffn_{role}_exps.weight" for x in slabs.layers for role in ROLES}
    for name, tensor in model.tensors.items():
        if name not in experts:
            yield name, tensor.shape, tensor.type, tensor.n_bytes
    for layer in slabs.layers:
        for expert in range(slabs.n_experts):
            for role, part in zip(ROLES, (layer.gate, layer.up, layer.down), strict=True):
                shape = (part.n_cols, part.n_rows)
                name = expert_name(layer.layer, role, expert)
                yield name, shape, part.type, part.bytes_per_expert


def _kept_entries(path: str) -> list[bytes]:
    """Keys with their values as they stand in the file."""
    descriptor = open_regular(path)
    try:
        cursor = Cursor(path, descriptor)
        cursor.position = _COUNTS_AT + 8
        kept = []
        for _ in range(cursor.u64("n_kv")):
            start = cursor.position
            (key,) = read_metadata(cursor, 1)
            if not key.startswith(DROPPED_KEYS):
                kept.append(cursor.buffer[start : cursor.position])
        return kept
    finally:
        os.close(descriptor)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
