"""Dense weights: read once into one anonymous arena, or mapped from the file as an arm to measure.

    arena (MAP_PRIVATE | MAP_ANONYMOUS, huge pages):  | tensor | pad to 64 | tensor | pad to 64 | …

Projections and the output head stay in the type of the file. Norms and routers become float32:
they are small, and routing must not depend on how they were stored. Embedding rows are read when
a step needs them, except where the output head is tied to them.

Nothing of it stays in the page cache (see `tensor_reads`). This module knows no experts; the names
of tensors were resolved by `arch`.
"""

import errno
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from compute_worker.arch import (
    DENSE_ALIGNMENT,
    LayerTensors,
    ModelSpec,
    dense_bytes,
    float_tensors,
    matrix_tensors,
)
from compute_worker.matrix import Bytes, Floats, Integers, Matrix, dequantise
from compute_worker.tensor_reads import PART_BYTES, TensorReader
from io_worker.gguf_header import TensorInfo
from io_worker.reader import ModelFile
from shm.mapped_files import MappedFiles

F32 = 0  # ggml type id
KEPT_ROW_BYTES = 3 * 1024 * 1024  # of embedding rows

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Chooses `n_active` experts; `norm_topk` scales their weights to sum 1."""

    matrix: Matrix  # (E, D), float32
    n_active: int
    norm_topk: bool


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The dense weights of one layer. Matrices are (outputs, inputs)."""

    attn_norm: Floats  # (D)
    q: Matrix  # (H * head_width, D)
    k: Matrix  # (K * head_width, D)
    v: Matrix  # (K * head_width, D)
    attn_output: Matrix  # (D, H * head_width)
    q_norm: Floats | None
    k_norm: Floats | None
    ffn_norm: Floats  # (D)
    router: Router


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingRows:
    """Rows of the token embedding: from `table` where it is resident, else from the file.

    `kept` are rows that were read lately, by token: a text uses few tokens most of the time, and a
    read takes 0.1 to 0.3 ms. `ahead` are rows that are wanted next, with their tokens.
    """

    info: TensorInfo
    reader: TensorReader
    table: Matrix | None
    kept: dict[int, Bytes] = field(default_factory=dict)
    ahead: list[tuple[Integers, Floats]] = field(default_factory=list)

    def look_ahead(self, token_ids: Integers) -> None:
        """Get rows while nobody waits for them: the next call of `rows` will ask for these."""
        found = self._found(token_ids)
        self.ahead[:] = [(token_ids, found)]

    def rows(self, token_ids: Integers) -> Floats:
        """token_ids (T), each below the vocabulary size -> (T, D). Each row is read once."""
        if self.ahead:
            ids, found = self.ahead.pop()
            if np.array_equal(ids, token_ids):
                return found
        return self._found(token_ids)

    def _found(self, token_ids: Integers) -> Floats:
        width, n_tokens = self.info.shape
        stride = self.info.n_bytes // n_tokens
        unique, place = np.unique(token_ids, return_inverse=True)
        if self.table is not None:
            data = self.table.data.reshape(n_tokens, stride)[unique]
        else:
            data = np.empty((len(unique), stride), np.uint8)
            for row, token in zip(data, unique.tolist(), strict=True):
                row[:] = self._row(token, stride)
        return dequantise(data, self.info.type, width)[place]

    def _row(self, token: int, stride: int) -> Bytes:
        found = self.kept.pop(token, None)
        if found is None:
            found = np.empty(stride, np.uint8)
            self.reader.read(self.info, token * stride, found.data)
            if len(self.kept) >= max(1, KEPT_ROW_BYTES // stride):
                del self.kept[next(iter(self.kept))]  # the one that was not used for longest
        self.kept[token] = found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All dense weights of a model. Arrays stay valid as long as this lives."""

    spec: ModelSpec
    embedding: EmbeddingRows
    layers: tuple[Layer, ...]
    output_norm: Floats  # (D)
    output: Matrix  # (V, D)
    arena: Bytes  # what to lock; empty where the weights are mapped


@dataclass(frozen=True, slots=True)
class _Source:
    """Where bytes come from: a matrix as it is in the file, a float32 array of any float tensor."""

    matrix: Callable[[TensorInfo], Matrix]
    floats: Callable[[TensorInfo], Floats]


def load_weights(spec: ModelSpec, files: Sequence[ModelFile], progress: Progress) -> Weights:
    """Read all dense weights into anonymous memory.

    `files` are the model's files by file index; their descriptors must stay open, for embedding
    rows. Raises `ModelFormatError` where a file ends early, `ReadError` for what the disk refuses,
    `OSError` for what the memory does.
    """
    reader = TensorReader(files)
    arena = _anonymous(dense_bytes(spec))
    total_bytes = sum(info.n_bytes for info in matrix_tensors(spec) + float_tensors(spec))
    used_bytes = done_bytes = 0

    def take(n_bytes: int) -> Bytes:
        nonlocal used_bytes
        start = used_bytes
        used_bytes += -(-n_bytes // DENSE_ALIGNMENT) * DENSE_ALIGNMENT
        return arena[start : start + n_bytes]

    def read(info: TensorInfo, target: Bytes) -> None:
        nonlocal done_bytes
        for start in range(0, info.n_bytes, PART_BYTES):
            part = target[start : start + PART_BYTES]
            reader.read(info, start, part.data)
            done_bytes += len(part)
            progress(done_bytes, total_bytes)

    def matrix(info: TensorInfo) -> Matrix:
        data = take(info.n_bytes)
        read(info, data)
        return _as_matrix(info, data)

    def floats(info: TensorInfo) -> Floats:
        data = take(4 * math.prod(info.shape))
        if info.type == F32:
            read(info, data)
            return data.view(np.float32)
        raw = np.empty(info.n_bytes, np.uint8)
        read(info, raw)
        data.view(np.float32)[:] = dequantise(raw, info.type, info.shape[0]).ravel()
        return data.view(np.float32)

    weights = _assemble(spec, reader, _Source(matrix, floats), arena)
    assert used_bytes == arena.nbytes, (used_bytes, arena.nbytes)
    return weights


def map_weights(spec: ModelSpec, files: Sequence[ModelFile], mapped: MappedFiles) -> Weights:
    """The same, with matrices left in the page cache: `mapped` are the `files`, and stay so. A file
    that shrinks ends the process with SIGBUS."""
    everything = np.frombuffer(mapped.view, np.uint8)

    def raw(info: TensorInfo) -> Bytes:
        start = mapped.starts[info.file] + info.offset
        return everything[start : start + info.n_bytes]

    def floats(info: TensorInfo) -> Floats:
        return np.array(dequantise(raw(info), info.type, info.shape[0]).ravel())

    source = _Source(lambda info: _as_matrix(info, raw(info)), floats)
    return _assemble(spec, TensorReader(files), source, np.empty(0, np.uint8))


def _assemble(spec: ModelSpec, reader: TensorReader, source: _Source, arena: Bytes) -> Weights:
    output = source.matrix(spec.output or spec.token_embedding)
    layers = tuple([_layer(spec, tensors, source) for tensors in spec.layers])
    embedding = spec.token_embedding
    table = output if spec.output is None else None
    return Weights(
        spec=spec,
        embedding=EmbeddingRows(embedding, reader, table),
        layers=layers,
        output_norm=source.floats(spec.output_norm),
        output=output,
        arena=arena,
    )


def _layer(spec: ModelSpec, tensors: LayerTensors, source: _Source) -> Layer:
    router = source.floats(tensors.router).view(np.uint8)
    matrix = Matrix(router, F32, n_rows=spec.n_experts, n_cols=spec.width)
    return Layer(
        attn_norm=source.floats(tensors.attn_norm),
        q=source.matrix(tensors.q),
        k=source.matrix(tensors.k),
        v=source.matrix(tensors.v),
        attn_output=source.matrix(tensors.attn_output),
        q_norm=source.floats(tensors.q_norm) if tensors.q_norm else None,
        k_norm=source.floats(tensors.k_norm) if tensors.k_norm else None,
        ffn_norm=source.floats(tensors.ffn_norm),
        router=Router(matrix, spec.n_active, spec.norm_topk),
    )


def _as_matrix(info: TensorInfo, data: Bytes) -> Matrix:
    n_cols, n_rows = info.shape
    return Matrix(data, info.type, n_rows, n_cols)


def _anonymous(n_bytes: int) -> Bytes:
    memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without transparent huge pages
            raise
    return np.frombuffer(memory, np.uint8)
