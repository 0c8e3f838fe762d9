"""How long a step computes: ``python -P -m compute_worker.step_speed MODEL``, nothing is loaded.

Runs the real forward pass over a few layers of the model's own shapes and types, whose weights are
all zero, in as much memory as no cache holds: what a kernel takes does not depend on the weights.
The layers are taken one of each kind (types of the tensors) in turn; a model's time is the sum over
its layers of the time of their kind. Prints one JSON object with seconds: of everything but the
experts of one token and of a prompt's tokens, and of one expert for one token and for many.
"""

import argparse
import dataclasses
import json
import math
import mmap
import os
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from compute_worker.arch import KV_BLOCK_TOKENS, LayerTensors, ModelSpec, resolve
from compute_worker.forward import Batch, forward, logits
from compute_worker.kernel_choice import select
from compute_worker.kernels import Kernels
from compute_worker.kv import KvCache
from compute_worker.matrix import (
    Addresses,
    Bytes,
    Floats,
    Integers,
    Matrix,
    aligned_floats,
    expert_shape,
    group_by_expert,
)
from compute_worker.tensor_reads import TensorReader
from compute_worker.weights import EmbeddingRows, Layer, Router, Weights
from io_worker.gguf_header import ModelFormatError, TensorInfo
from io_worker.model_file import open_model
from io_worker.slabs import LayerSlabs

EXIT_MODEL = 3
F32 = 0  # ggml type id
MiB = 1 << 20
WORK_BYTES = 192 * MiB  # of layers: beyond the caches of the machines this is for
HEAD_BYTES = 48 * MiB  # of the output head's rows; the rest takes as long per byte
MIN_STEPS = 3


def main() -> int:
    """Exit code: 0, or 3 for a model that cannot be used."""
    parser = argparse.ArgumentParser(prog="compute_worker.step_speed", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--numerics", default="fast")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of a prompt chunk")
    parser.add_argument("--work-bytes", type=int, default=WORK_BYTES, help="of made-up layers")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each of two measurements")
    options = parser.parse_args()
    try:
        spec = resolve(open_model(options.model))
    except ModelFormatError as error:
        print(error, file=sys.stderr)
        return EXIT_MODEL
    kernels = select(options.kernels, options.numerics, options.threads)
    stage = Stage(spec, kernels, options.kv_type, options.prompt_tokens, options.work_bytes)
    record = {
        "kernels": kernels.name,
        "threads": options.threads,
        "decode": stage.measure(1, options.seconds),
        "prompt_tokens": options.prompt_tokens,
        "prompt": stage.measure(options.prompt_tokens, options.seconds),
    }
    print(json.dumps(record))
    return 0


@dataclass(slots=True)
class Clock:
    """Seconds that each layer took, by its place, and its experts alone."""

    layers: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    experts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True, slots=True, eq=False)
class Stock:
    """Memory of some experts: (n, 3) addresses of gate, up and down in `data`."""

    data: Bytes
    addresses: Addresses


class Stage:
    """A few layers in memory, and the kernels that run them."""

    def __init__(
        self, spec: ModelSpec, kernels: Kernels, kv_type: str, n_tokens: int, work_bytes: int
    ) -> None:
        self._kinds = Counter(map(_kind, spec.layers, spec.slabs.layers))
        chosen = _sample(spec, work_bytes)
        slabs = tuple(spec.slabs.layers[index] for index in chosen)
        layers = tuple(spec.layers[index] for index in chosen)
        self._spec = dataclasses.replace(
            spec,
            n_layers=len(chosen),
            layers=layers,
            slabs=dataclasses.replace(spec.slabs, layers=slabs),
        )
        self._kernels = kernels
        n_blocks = -(-n_tokens // KV_BLOCK_TOKENS)
        self._kv = KvCache(len(chosen), spec.n_kv_heads, spec.head_width, n_blocks, kv_type)
        self._table = np.array([[self._kv.allocate() for _ in range(n_blocks)]], np.int32)
        self._weights = _weights(self._spec)
        self._head_share = self._weights.output.n_rows / spec.vocabulary_size
        self._stocks = [_stock(layer, spec.n_active) for layer in slabs]
        self._out = aligned_floats(n_tokens * spec.n_active, spec.width)  # as the feed keeps it
        self._clock = Clock()

    def measure(self, n_tokens: int, seconds: float) -> dict[str, float]:
        """Seconds of the whole model for a step of so many tokens: `dense_s` of everything but the
        experts, `expert_s` of one expert with its share of the tokens."""
        self._step(n_tokens)  # first touch, threads awake
        self._clock = clock = Clock()
        heads: list[float] = []
        started = time.perf_counter()
        while len(heads) < MIN_STEPS or time.perf_counter() - started < seconds:
            heads.append(self._step(n_tokens))
        dense = experts = 0.0
        kinds = list(map(_kind, self._spec.layers, self._spec.slabs.layers))
        for layer, kind in enumerate(kinds):
            weight = self._kinds[kind] / kinds.count(kind)
            inside = float(np.median(clock.experts[layer]))
            experts += weight * inside
            dense += weight * (float(np.median(clock.layers[layer])) - inside)
        n_used = sum(self._kinds.values()) * min(
            self._spec.n_experts, n_tokens * self._spec.n_active
        )
        head = float(np.median(heads)) / self._head_share
        return {"dense_s": dense + head, "expert_s": experts / n_used}

    def _step(self, n_tokens: int) -> float:
        """One step; returns the seconds of the output head for one token."""
        batch = Batch(
            np.zeros(n_tokens, np.int32),
            np.arange(n_tokens, dtype=np.int32),
            np.zeros(n_tokens, np.int32),
            self._table,
        )
        hidden = np.ones((n_tokens, self._spec.width), np.float32)
        begun: list[float] = []

        def before(layer: int) -> None:
            begun.append(time.perf_counter())

        given = (batch, hidden, range(self._spec.n_layers), self._kv, self._feed, None)
        hidden = forward(self._weights, *given, self._kernels, before=before)
        ended = time.perf_counter()
        logits(self._weights, hidden[-1:], self._kernels)
        head_seconds = time.perf_counter() - ended
        for layer, (begin, end) in enumerate(pairwise([*begun, ended])):
            self._clock.layers[layer].append(end - begin)
        return head_seconds

    def _feed(self, layer: int, x: Floats, chosen: Integers, weights: Floats) -> Floats:
        """The experts of a layer, spread evenly over the tokens; several share their memory."""
        started = time.perf_counter()
        n_experts = self._spec.n_experts
        spread = np.arange(chosen.size, dtype=np.int32).reshape(chosen.shape) % n_experts
        pairs = group_by_expert(np.sort(spread, axis=-1))
        shape = expert_shape(self._spec.slabs.layers[layer])
        stock = self._stocks[layer].addresses
        addresses = stock[[expert % len(stock) for expert in pairs]]
        out = self._out[: chosen.size]
        wanted = list(pairs.values())
        self._kernels.expert_blocks(shape, addresses, wanted, self._spec.n_active, x, out)
        total = self._kernels.combine(out, weights)
        self._clock.experts[layer].append(time.perf_counter() - started)
        return total


def _kind(tensors: LayerTensors, slabs: LayerSlabs) -> tuple[int, ...]:
    """The types that decide what a layer takes."""
    dense = (tensors.q.type, tensors.k.type, tensors.v.type, tensors.attn_output.type)
    return (*dense, slabs.gate.type, slabs.up.type, slabs.down.type)


def _sample(spec: ModelSpec, work_bytes: int) -> list[int]:
    """Layers to measure: of each kind in turn, as many as fit into the memory, one at least."""
    of_kind: dict[tuple[int, ...], list[int]] = {}
    for index, pair in enumerate(zip(spec.layers, spec.slabs.layers, strict=True)):
        of_kind.setdefault(_kind(*pair), []).append(index)
    turns = max(len(layers) for layers in of_kind.values())
    order = [
        layers[turn] for turn in range(turns) for layers in of_kind.values() if turn < len(layers)
    ]
    chosen: list[int] = []
    n_bytes = 0
    for index in order:
        dense = spec.layers[index]
        size = sum(t.n_bytes for t in (dense.q, dense.k, dense.v, dense.attn_output))
        size += spec.n_active * spec.slabs.layers[index].slab_bytes
        if len(chosen) >= len(of_kind) and n_bytes + size > work_bytes:
            break
        chosen.append(index)
        n_bytes += size
    return chosen


def _memory(n_bytes: int, *, shared: bool) -> Bytes:
    """Zeros in pages of their own: a page that was never written would be one for all."""
    memory = mmap.mmap(-1, n_bytes, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
    if not shared:
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    data[:] = 0
    return data


def _stock(layer: LayerSlabs, n_experts: int) -> Stock:
    """Memory for so many experts, in small pages as those of the pool."""
    data = _memory(n_experts * layer.slab_bytes, shared=True)
    gate, up, _ = layer.range_bytes
    first = data.__array_interface__["data"][0]
    starts = first + np.arange(n_experts, dtype=np.uint64)[:, None] * np.uint64(layer.slab_bytes)
    return Stock(data, starts + np.array([0, gate, gate + up], np.uint64))


def _weights(spec: ModelSpec) -> Weights:
    """Weights of zero, norms of one; of the output head only as many rows as are measured."""
    head = spec.output or spec.token_embedding
    row = head.n_bytes // head.shape[1]
    n_rows = min(head.shape[1], max(1, HEAD_BYTES // row))
    output = Matrix(_memory(n_rows * row, shared=False), head.type, n_rows, head.shape[0])
    return Weights(
        spec=spec,
        embedding=EmbeddingRows(spec.token_embedding, TensorReader(()), None),
        layers=tuple([_layer(spec, tensors) for tensors in spec.layers]),
        output_norm=_ones(spec.output_norm),
        output=output,
        arena=np.empty(0, np.uint8),
    )


def _layer(spec: ModelSpec, tensors: LayerTensors) -> Layer:
    router = np.zeros(4 * spec.n_experts * spec.width, np.uint8)
    matrix = Matrix(router, F32, n_rows=spec.n_experts, n_cols=spec.width)
    return Layer(
        attn_norm=_ones(tensors.attn_norm),
        q=_zeros(tensors.q),
        k=_zeros(tensors.k),
        v=_zeros(tensors.v),
        attn_output=_zeros(tensors.attn_output),
        q_norm=_ones(tensors.q_norm) if tensors.q_norm else None,
        k_norm=_ones(tensors.k_norm) if tensors.k_norm else None,
        ffn_norm=_ones(tensors.ffn_norm),
        router=Router(matrix, spec.n_active, spec.norm_topk),
    )


def _zeros(info: TensorInfo) -> Matrix:
    n_cols, n_rows = info.shape
    return Matrix(_memory(info.n_bytes, shared=False), info.type, n_rows, n_cols)


def _ones(info: TensorInfo) -> Floats:
    return np.ones(math.prod(info.shape), np.float32)


if __name__ == "__main__":
    sys.exit(main())
