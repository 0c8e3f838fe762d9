"""Dense weights in memory, embedding rows, truncated files, locked memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_builder import tiny_model

from compute_worker import weights as weights_module
from compute_worker.arch import ModelSpec, dense_bytes, resolve
from compute_worker.matrix import Matrix, dequantise
from compute_worker.weights import Weights, load_weights, map_weights
from io_worker.gguf_header import ModelFormatError
from io_worker.model_file import open_model
from io_worker.reader import ModelFile, close_files, open_files
from shm.mapped_files import MappedFiles


@contextmanager
def opened(path: Path) -> Iterator[tuple[ModelSpec, list[ModelFile]]]:
    model = open_model(path)
    files = open_files(model.paths)
    try:
        yield resolve(model), files
    finally:
        close_files(files)


def load(spec: ModelSpec, files: list[ModelFile], how: str) -> Weights:
    if how == "mapped":
        mapped = MappedFiles([file.fd for file in files], [file.size_bytes for file in files])
        return map_weights(spec, files, mapped)
    return load_weights(spec, files, lambda done, total: None)


def values(matrix: Matrix) -> np.ndarray:
    return dequantise(matrix.data, matrix.type, matrix.n_cols)


@pytest.mark.parametrize("how", ["anonymous", "mapped"])
@pytest.mark.parametrize(
    "options",
    [
        {"arch": "olmoe", "quantisation": "Q4_K_M"},
        {"arch": "qwen3moe", "tied": True, "quantisation": "BF16"},
        {"arch": "qwen3moe", "split": 3},
    ],
)
def test_every_weight_is_what_the_file_says(
    tmp_path: Path, options: dict[str, Any], how: str
) -> None:
    path = tiny_model(tmp_path / "model.gguf", **options)
    expected = {
        tensor.name.removesuffix(".weight"): dequantize(tensor.data, tensor.tensor_type)
        for part in sorted(tmp_path.glob("*.gguf"))
        for tensor in GGUFReader(part).tensors
    }
    with opened(path) as (spec, files):
        weights = load(spec, files, how)
        tokens = np.array([3, 400, 3, 0], np.int32)
        assert (weights.embedding.rows(tokens) == expected["token_embd"][tokens]).all()
    assert (weights.output_norm == expected["output_norm"]).all()
    head = expected["token_embd"] if "tied" in options else expected["output"]
    assert (values(weights.output) == head).all()
    for index, layer in enumerate(weights.layers):
        found = {
            "attn_norm": layer.attn_norm,
            "attn_q": values(layer.q),
            "attn_k": values(layer.k),
            "attn_v": values(layer.v),
            "attn_output": values(layer.attn_output),
            "attn_q_norm": layer.q_norm,
            "attn_k_norm": layer.k_norm,
            "ffn_norm": layer.ffn_norm,
            "ffn_gate_inp": values(layer.router.matrix),
        }
        for name, array in found.items():
            assert array is not None and array.dtype == np.float32
            assert (array == expected[f"blk.{index}.{name}"]).all(), name


def test_the_arena_is_exactly_as_large_as_announced_and_aligned(tmp_path: Path) -> None:
    with opened(tiny_model(tmp_path / "model.gguf")) as (spec, files):
        reports: list[tuple[int, int]] = []
        weights = load_weights(spec, files, lambda done, total: reports.append((done, total)))
    assert weights.arena.nbytes == dense_bytes(spec)
    for layer in weights.layers:
        for matrix in (layer.q, layer.k, layer.v, layer.attn_output, layer.router.matrix):
            assert matrix.address % 64 == 0
    assert reports == sorted(reports)
    assert reports[-1][0] == reports[-1][1] == reports[0][1]


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model.gguf")
    with opened(path) as (spec, files):
        os.truncate(path, spec.output_norm.offset + 1)
        with pytest.raises(ModelFormatError, match=r"output.*: expected \d+ bytes, found the end"):
            load(spec, files, "anonymous")


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    tokens = np.array([5, 6], np.int32)
    with opened(tiny_model(tmp_path / "model.gguf")) as (spec, files):
        expected = load(spec, files, "anonymous")
        rows = expected.embedding.rows(tokens)
        monkeypatch.setattr(os, "preadv", lambda fd, to, *rest: preadv(fd, [to[0][:37]], *rest))
        found = load(spec, files, "anonymous")
        assert (found.embedding.rows(tokens) == rows).all()
    assert (found.arena == expected.arena).all()


def test_a_renamed_and_deleted_file_goes_on_giving_rows(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model.gguf")
    with opened(path) as (spec, files):
        weights = load(spec, files, "anonymous")
        before = weights.embedding.rows(np.array([7], np.int32))
        path.unlink()
        assert (weights.embedding.rows(np.array([7], np.int32)) == before).all()


def test_rows_that_were_used_lately_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_model(tmp_path / "model.gguf")) as (spec, files):
        embedding = load(spec, files, "anonymous").embedding
        stride = embedding.info.n_bytes // embedding.info.shape[1]
        monkeypatch.setattr(weights_module, "KEPT_ROW_BYTES", 3 * stride)
        whole = embedding.rows(np.arange(20, dtype=np.int32))
        for tokens in ([1, 2], [3], [1], [4], [19, 1]):
            assert (embedding.rows(np.array(tokens, np.int32)) == whole[tokens]).all()
        assert list(embedding.kept) == [4, 1, 19]


def test_rows_that_were_had_ahead_are_those_that_are_asked_for(tmp_path: Path) -> None:
    with opened(tiny_model(tmp_path / "model.gguf")) as (spec, files):
        embedding = load(spec, files, "anonymous").embedding
        whole = embedding.rows(np.arange(20, dtype=np.int32))
        for ahead, tokens in (
            ([3], [3]),
            ([3, 4], [3, 4]),
            ([3], [5]),
            ([3], [3, 4]),
            ([5, 6], [5]),
        ):
            embedding.look_ahead(np.array(ahead, np.int32))
            for _ in range(2):  # what was had ahead may be changed: it is handed out once
                rows = embedding.rows(np.array(tokens, np.int32))
                assert (rows == whole[tokens]).all()
                rows[:] = 0
