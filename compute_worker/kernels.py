"""The operations of a layer behind one record of functions.

Rule for every provider: an output element depends on its weight row and its own token only. The
order of additions over the inner dimension is fixed by type and length, never by the number of
tokens, rows or threads. So batching, chunks, waves and thread counts never change a bit.

Providers are rows of `kernel_choice.BUILDERS`. `reference` is the definition of every operation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compute_worker.kv import KvCache
from compute_worker.matrix import Addresses, Bytes, ExpertShape, Floats, Integers, Matrix
from compute_worker.weights import Weights

Matmul = Callable[[Matrix, Floats], Floats]
Matmuls = Callable[[Sequence[Matrix], Floats], Sequence[Floats]]
RmsNorm = Callable[[Floats, Floats, float], Floats]
Rotate = Callable[[Floats, Floats, Floats], Floats]
TopExperts = Callable[[Floats, int, bool], tuple[Integers, Floats]]
Combine = Callable[[Floats, Floats], Floats]
ExpertBlocks = Callable[[ExpertShape, Addresses, Sequence[Integers], int, Floats, Floats], None]
Attention = Callable[[Floats, KvCache, int, Integers, Integers, Integers], Floats]
StoreKv = Callable[[KvCache, int, Floats, Floats, Integers, Integers, Integers], None]
Attend = Callable[["Kernels", Weights, int, Floats, "Places", KvCache], None]
Choice = tuple[Floats, Integers, Floats]  # x (T, D), ids (T, A) ascending, weights (T, A)
Choose = Callable[["Kernels", Weights, int, Floats], Choice]
KnownLayers = Callable[
    ["Kernels", Weights, range, Floats, "Places", KvCache, Addresses, int], "LayerRun"
]


class KernelError(Exception):
    """The kernels that were asked for do not exist here."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the tokens of a batch are, the same in all layers (see `forward.Batch`), and the angles
    of their positions."""

    tables: Integers  # (S, most blocks)
    sequence_of_token: Integers  # (T)
    positions: Integers  # (T)
    cosines: Floats  # (T, rope_width / 2)
    sines: Floats


@dataclass(frozen=True, slots=True, eq=False)
class LayerRun:
    """What some layers did whose experts were known, and where that ended."""

    layers: range  # those that are done
    chosen: Integers  # (layers, T, A), ascending ids
    experts_ns: int  # spent in the experts
    unknown: Choice | None  # of the layer after them, which is to be fed; None: all are done
    # Experts of the next layer, likeliest first: told at each that is done, and at the one unknown
    guesses: Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Signatures, shapes and effects are those of the functions in `reference`; of the halves of a
    layer, `attend` and `choose`, those in `dense_layer`, and of several layers that in
    `known_layers`: they may use the others."""

    name: str  # for the first line of a run: "numpy", "avx512-vnni", …
    matmul: Matmul
    matmuls: Matmuls
    rms_norm: RmsNorm
    rotate: Rotate
    top_experts: TopExperts
    combine: Combine
    expert_blocks: ExpertBlocks
    attention: Attention
    store_kv: StoreKv
    attend: Attend
    choose: Choose
    known_layers: KnownLayers
    read_all: Callable[[Bytes], int]  # sum of all 64-bit words: how fast memory can be read
    park: Callable[[], None]  # threads stop spinning; the next call wakes them
    close: Callable[[], None]  # threads end; no other function may be called afterwards
