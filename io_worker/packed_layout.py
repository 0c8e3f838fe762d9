"""A packed model: one GGUF file in which every expert is one contiguous, page-aligned range.

    header with the keys below | dense tensors | slab of layer 0 expert 0 | expert 1 | … | layer 1 …

    one slab:  | blk.N.ffn_gate.E.weight | pad | blk.N.ffn_up.E.weight | pad | blk.N.ffn_down.E.… |

`general.alignment` is a page, so every tensor starts at one, and any GGUF tool can list and read
the file. A joined `ffn_gate_exps` tensor cannot say where its interleaved parts lie, so each expert
has tensors of its own, under the names that GGUF had for this before; programs that want the joined
ones refuse the file by name. `joined` gives the joined tensors back, with a gap between experts.

    moe_coord.packed.checksums    array of u64, the first key; 0: of the header, then of each dense
                                  tensor in header order, then of each slab by layer and expert
    moe_coord.packed.version      u32, 1
    moe_coord.packed.fingerprint  of the file it was made of: counts and traces fit both

A checksum is 8 bytes of BLAKE2b over tensor bytes without padding, little-endian; 0 stands for
"not written yet". That of the header counts the array itself as zeros. They find accidents, not
forgers. This module reads no tensor data and writes nothing.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from io_worker.gguf_header import GgufHeader, ModelFormatError, TensorInfo
from shm.pool import ALIGNMENT, align_up

VERSION = 1
KEY_PREFIX = "moe_coord.packed."
CHECKSUMS_KEY = KEY_PREFIX + "checksums"
VERSION_KEY = KEY_PREFIX + "version"
FINGERPRINT_KEY = KEY_PREFIX + "fingerprint"
ROLES = ("gate", "up", "down")
CHECKSUM_BYTES = 8
# magic, version and two counts; the key with its length, its type, the type and number of elements
CHECKSUMS_AT = 24 + 8 + len(CHECKSUMS_KEY) + 4 + 4 + 8
_EXPERT_NAME = re.compile(r"blk\.([0-9]{1,5})\.ffn_(gate|up|down)\.([0-9]{1,5})\.weight")
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_PACK_AGAIN = "pack the model again"


@dataclass(frozen=True, slots=True)
class PackedModel:
    """What a packed file says of the model: `tensors` as the plain file has them, experts joined.

    A joined tensor begins where its expert 0 does, and its experts lie a slab apart.
    """

    fingerprint: str
    tensors: dict[str, TensorInfo]
    checksums: tuple[int, ...]


def checksum_of(pieces: Iterable[bytes | memoryview]) -> int:
    """Checksum of bytes that come in pieces; never 0."""
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    for piece in pieces:
        digest.update(piece)
    return int.from_bytes(digest.digest(), "little") or 1


def header_checksum(raw: bytes, n_checksums: int) -> int:
    """Of a header whose first key is the array of so many checksums."""
    stop = CHECKSUMS_AT + n_checksums * CHECKSUM_BYTES
    return checksum_of((raw[:CHECKSUMS_AT], bytes(stop - CHECKSUMS_AT), raw[stop:]))


def expert_name(layer: int, role: str, expert: int) -> str:
    """Name of one matrix of one expert in a packed file."""
    return f"blk.{layer}.ffn_{role}.{expert}.weight"


def is_packed(header: GgufHeader) -> bool:
    """Whether the file says that it is packed."""
    return VERSION_KEY in header.metadata


def read_packed(header: GgufHeader) -> PackedModel:
    """The model of a packed file, its header and layout checked; raises `ModelFormatError`."""
    _expect(header, VERSION_KEY, VERSION, header.metadata[VERSION_KEY])
    _expect(header, "general.alignment", ALIGNMENT, header.alignment)
    fingerprint = header.metadata.get(FINGERPRINT_KEY)
    if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise ModelFormatError(
            header.path, FINGERPRINT_KEY, f"expected 32 hex digits, found another; {_PACK_AGAIN}"
        )
    tensors, n_slabs = joined(header)
    n_dense = len(tensors) - n_slabs[0] * len(ROLES)
    checksums = header.metadata.get(CHECKSUMS_KEY)
    n_checksums = 1 + n_dense + n_slabs[0] * n_slabs[1]
    if next(iter(header.metadata)) != CHECKSUMS_KEY or not isinstance(checksums, list):
        raise ModelFormatError(header.path, CHECKSUMS_KEY, "expected an array, as the first key")
    _expect(header, CHECKSUMS_KEY, n_checksums, len(checksums))
    found = header_checksum(header.raw, n_checksums)
    if found != checksums[0]:
        raise ModelFormatError(
            header.path,
            "header",
            f"expected checksum {checksums[0]:016x}, found {found:016x}; the file is damaged, "
            f"{_PACK_AGAIN}",
        )
    return PackedModel(fingerprint, tensors, tuple(checksums))


def joined(header: GgufHeader) -> tuple[dict[str, TensorInfo], tuple[int, int]]:
    """Dense tensors in their order, then the joined experts; how many layers, experts of a layer.

    Raises `ModelFormatError` for an expert that does not lie as the layout says.
    """
    dense: dict[str, TensorInfo] = {}
    experts: dict[tuple[int, int], dict[str, TensorInfo]] = {}
    for name, tensor in header.tensors.items():
        match = _EXPERT_NAME.fullmatch(name)
        if match is None:
            dense[name] = tensor
        else:
            experts.setdefault((int(match[1]), int(match[3])), {})[match[2]] = tensor
    layers = sorted({layer for layer, _ in experts})
    n_experts = 1 + max((expert for _, expert in experts), default=-1)
    wanted = [(layer, expert) for layer in layers for expert in range(n_experts)]
    if list(experts) != wanted or not layers:
        raise ModelFormatError(
            header.path,
            "experts",
            f"expected {n_experts} of each of {len(layers)} layers, in order; {_PACK_AGAIN}",
        )
    for layer in layers:
        first = experts[layer, 0]
        for expert in range(n_experts):
            _check_slab(header, layer, expert, experts[layer, expert], first)
        for role in ROLES:
            name = f"blk.{layer}.ffn_{role}_exps.weight"
            part = first[role]
            shape, n_bytes = (*part.shape, n_experts), part.n_bytes * n_experts
            dense[name] = replace(part, name=name, shape=shape, n_bytes=n_bytes)
    return dense, (len(layers), n_experts)


def _check_slab(
    header: GgufHeader,
    layer: int,
    expert: int,
    parts: dict[str, TensorInfo],
    first: dict[str, TensorInfo],
) -> None:
    """An expert has what expert 0 of its layer has, a whole number of slabs behind it."""
    if set(parts) != set(ROLES):
        raise ModelFormatError(
            header.path,
            f"layer {layer} expert {expert}",
            f"expected gate, up and down, found {' and '.join(parts)}; {_PACK_AGAIN}",
        )
    stride = sum(align_up(first[role].n_bytes) for role in ROLES)
    place = first["gate"].offset + expert * stride
    for role in ROLES:
        part, model = parts[role], first[role]
        wanted = (model.type, model.shape, place)
        if len(part.shape) != 2 or (part.type, part.shape, part.offset) != wanted:
            raise ModelFormatError(
                header.path,
                part.name,
                f"expected type {model.type}, two dimensions {list(model.shape)} at byte {place}, "
                f"found type {part.type}, {list(part.shape)} at byte {part.offset}; {_PACK_AGAIN}",
            )
        place += align_up(part.n_bytes)


def _expect(header: GgufHeader, key: str, expected: int, found: object) -> None:
    if found != expected or type(found) is not int:
        raise ModelFormatError(
            header.path, key, f"expected {expected}, found {found!r:.40}; {_PACK_AGAIN}"
        )
