"""The tiny models are what their options say, as other readers of the format see them."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from gguf_builder import tiny_model, vocabulary
from gguf_bytes import STRING, entry
from random_weights import random_matrix
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from io_worker.model_file import open_model

TYPES = (
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ2_XXS IQ2_XS IQ2_S "
    "IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4"
)


@pytest.mark.parametrize("type_name", TYPES.split())
def test_random_weights_are_finite_and_of_the_deviation_asked_for(type_name: str) -> None:
    rows = random_matrix(type_name, 64, 256, 0.125, np.random.default_rng(3))
    weights = dequantize(rows, GGMLQuantizationType[type_name])
    assert weights.shape == (64, 256)
    assert np.isfinite(weights).all()
    # MXFP4 has scales of powers of two, so it may be off by the root of two.
    assert 0.7 < weights.std() / 0.125 < 1.45
    # TQ2_0 has a code that no quantiser writes, which moves its mean by half a step.
    assert abs(weights.mean()) < 0.125 / 2


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_K_M", "F16"])
@pytest.mark.parametrize("arch", ["olmoe", "qwen3moe"])
def test_the_gguf_package_reads_the_same(tmp_path: Path, arch: str, quantisation: str) -> None:
    path = tiny_model(tmp_path / "m.gguf", arch=arch, quantisation=quantisation)
    model, other = open_model(path), GGUFReader(path)
    fields = {key: field for key, field in other.fields.items() if not key.startswith("GGUF.")}
    assert model.metadata == {key: field.contents() for key, field in fields.items()}
    assert [
        (tensor.name, tuple(tensor.shape), int(tensor.tensor_type), tensor.data_offset)
        for tensor in other.tensors
    ] == [(info.name, info.shape, info.type, info.offset) for info in model.tensors.values()]


def test_the_same_options_give_the_same_bytes(tmp_path: Path) -> None:
    first = tiny_model(tmp_path / "a.gguf", quantisation="Q4_K_M", seed=5).read_bytes()
    assert tiny_model(tmp_path / "b.gguf", quantisation="Q4_K_M", seed=5).read_bytes() == first
    assert tiny_model(tmp_path / "c.gguf", quantisation="Q4_K_M", seed=6).read_bytes() != first


def test_options_change_what_they_name(tmp_path: Path) -> None:
    path = tiny_model(
        tmp_path / "m.gguf",
        arch="qwen3moe",
        tied=True,
        expert_width_key=False,
        rope_base_key=False,
        version=2,
        alignment=64,
        entries={"general.name": None, "general.author": entry("general.author", STRING, "me")},
    )
    model = open_model(path)
    assert "output.weight" not in model.tensors
    assert "qwen3moe.expert_feed_forward_length" not in model.metadata
    assert "qwen3moe.rope.freq_base" not in model.metadata
    assert "general.name" not in model.metadata and model.metadata["general.author"] == "me"
    assert {tensor.offset % 64 for tensor in model.tensors.values()} == {0}
    assert path.read_bytes()[4] == 2


def test_the_vocabulary_encodes_every_byte_and_some_words() -> None:
    tokens, kinds, merges = vocabulary()
    assert len(tokens) == len(kinds) == len(set(tokens))
    pairs = [(left, right) for left, right in [merge.split(" ") for merge in merges]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "Hello world, \0\t\x7f é 你 🙂"
    encoding = tokenizer.encode(text)
    assert encoding.tokens[:3] == ["Hello", "Ġworld", ","]
    assert tokenizer.decode(encoding.ids) == text
