from pathlib import Path

from gguf import GGUFReader

from coordinator.models.synth_header import (
    SynthTensor,
    header_bytes,
    padded,
    vocabulary_entries,
)
from coordinator.text.tokenizer import build_tokenizer
from io_worker.ggml_types import GGML_TYPES
from io_worker.gguf_header import read_header

TENSORS = [
    SynthTensor("odd.weight", (3,), GGML_TYPES[0], None),
    SynthTensor("blk.0.x.weight", (256, 2, 5), GGML_TYPES[12], 0.02),
]


def write(path: Path) -> None:
    entries, n_entries = vocabulary_entries(1100, "qwen2")
    keys: dict[str, int | float | str] = {
        "general.architecture": "olmoe",
        "olmoe.block_count": 7,
        "olmoe.rope.freq_base": 1e4,
    }
    header = header_bytes(keys, entries, n_entries, TENSORS)
    assert len(header) % 32 == 0
    path.write_bytes(header + bytes(sum(padded(tensor.n_bytes) for tensor in TENSORS)))


def test_our_own_strict_reader_and_the_gguf_package_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    header = read_header(path)
    assert header.metadata["olmoe.block_count"] == 7
    assert header.metadata["olmoe.rope.freq_base"] == 1e4
    reader = GGUFReader(path)
    assert [t.name for t in reader.tensors] == [t.name for t in TENSORS]
    for theirs, ours in zip(reader.tensors, TENSORS, strict=True):
        found = header.tensors[ours.name]
        assert tuple(theirs.shape) == found.shape == ours.shape
        assert theirs.data_offset == found.offset
        assert theirs.n_bytes == found.n_bytes == ours.n_bytes


def test_the_vocabulary_tokenizes_any_text(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    metadata = read_header(path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list | tuple)
    assert len(tokens) == len(set(tokens)) == 1100
    tokenizer = build_tokenizer(metadata, str(path))
    ids = tokenizer.encode("in the end: 世界", add_special=False, parse_special=False)
    spelled = [tokens[token] for token in ids]
    assert spelled[:2] == ["in", "Ġt"]
    assert len(ids) < len("in the end: 世界".encode())
