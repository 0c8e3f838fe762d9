"""Dense tensors are read past the page cache."""

import ctypes
import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import tiny_model

from compute_worker.arch import resolve
from compute_worker.tensor_reads import TensorReader
from compute_worker.weights import load_weights
from io_worker.gguf_header import ModelFormatError
from io_worker.model_file import open_model
from io_worker.probe import direct_refusal
from io_worker.reader import ModelFile, close_files, open_files


def cached_pages(file: ModelFile) -> int:
    """Pages of the file that are in the page cache now."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(file.fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        n_pages = -(-len(mapping) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * n_pages)()
        start = ctypes.c_char.from_buffer(mapping)
        assert libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(mapping)), found) == 0
        del start
    return sum(page & 1 for page in found)


def test_loading_and_embedding_leave_nothing_in_the_page_cache(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model.gguf", quantisation="Q4_K_M")
    spec = resolve(open_model(path))
    files = open_files([path])
    refusal = direct_refusal(files[0])
    if refusal is not None:
        close_files(files)
        pytest.skip(f"needs O_DIRECT: {refusal}")
    os.fsync(files[0].fd)
    os.posix_fadvise(files[0].fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached_pages(files[0]) == 0
    weights = load_weights(spec, files, lambda done, total: None)
    weights.embedding.rows(np.arange(spec.vocabulary_size, dtype=np.int32))
    assert cached_pages(files[0]) == 0
    close_files(files)


@pytest.mark.parametrize("direct", [True, False])
def test_any_part_of_a_tensor(tmp_path: Path, direct: bool) -> None:
    path = tiny_model(tmp_path / "model.gguf")
    info = open_model(path).tensors["token_embd.weight"]
    whole = path.read_bytes()[info.offset : info.offset + info.n_bytes]
    files = open_files([path])
    shown = files if direct else [replace(files[0], direct_fd=None)]
    reader = TensorReader(shown)
    for start, n_bytes in ((0, info.n_bytes), (1, 1), (4095, 2), (info.n_bytes - 1, 1)):
        target = bytearray(n_bytes)
        reader.read(info, start, memoryview(target))
        assert target == whole[start : start + n_bytes]
    close_files(files)


def test_the_end_of_the_file_is_named_with_its_tensor(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model.gguf")
    info = open_model(path).tensors["token_embd.weight"]
    files = open_files([path])
    os.truncate(path, info.offset + 10)
    with pytest.raises(ModelFormatError, match=r"token_embd\.weight: expected \d+ bytes, found"):
        TensorReader(files).read(info, 0, memoryview(bytearray(info.n_bytes)))
    close_files(files)
