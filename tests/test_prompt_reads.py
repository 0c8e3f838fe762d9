"""A prompt reads each expert at most once per layer and chunk, however small the pool is."""

import random
from pathlib import Path

import pytest
from gguf_builder import tiny_model
from prompt_reads import FEW_IDS, prompt_reads

from compute_worker.arch import resolve
from coordinator.core.slot_classes import smallest_pool_bytes
from io_worker.model_file import open_model

N_LAYERS, N_EXPERTS = 3, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompt-reads")
    return tiny_model(
        folder / "m.gguf", n_layers=N_LAYERS, n_experts=N_EXPERTS, n_active=4, quantisation="Q8_0"
    )


@pytest.mark.parametrize("pool", ["smallest", "30%", "80%"])
@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_each_expert_once_per_layer_and_chunk(model: Path, pool: str, policy: str) -> None:
    draw = random.Random(1)
    tokens = [draw.randrange(FEW_IDS) for _ in range(300)]
    if pool == "smallest":
        pool = str(smallest_pool_bytes(resolve(open_model(model)).slabs))
    flags = ["--chunk", "128", "--pool", pool, "--policy", policy, "--prefetch", "off"]
    found = prompt_reads(model, tokens, flags)
    assert found.n_chunks == 3
    assert found.n_needed > N_LAYERS * N_EXPERTS * 2, "each chunk needs nearly all experts"
    assert found.at_most_once, found
    assert found.bytes_read == found.n_misses * found.largest_slab_bytes
