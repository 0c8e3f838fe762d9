"""What `eval` keeps: it goes to the file as it comes, whole or not at all."""

import os
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from arms import run_program
from gguf_builder import tiny_model
from running_program import RunningProgram, wait_until

from compute_worker.arch import ModelSpec, resolve
from compute_worker.kept import KEPT_ROWS, KeptFileError, KeptPrompt
from coordinator.plan import footprint
from io_worker.model_file import open_model

N_TOKENS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", width=128)


@pytest.fixture(scope="module")
def spec(model: Path) -> ModelSpec:
    return resolve(open_model(model))


def fill(kept: KeptPrompt, spec: ModelSpec, rows: range) -> None:
    """A chunk whose numbers are those of its tokens."""
    tokens = np.arange(rows.start, rows.stop)
    for layer in range(spec.n_layers):
        kept.add_chosen(layer, np.tile(tokens[:, None] + layer, spec.n_active).astype(np.int32))
    for start in range(0, len(tokens), KEPT_ROWS):
        part = tokens[start : start + KEPT_ROWS, None]
        kept.add_logits(np.tile(part, spec.vocabulary_size).astype(np.float32))


@pytest.mark.parametrize("n_more", [0, 2])  # tokens that were drawn after the prompt
def test_what_is_kept_is_what_comes(spec: ModelSpec, tmp_path: Path, n_more: int) -> None:
    with (tmp_path / "kept.npz").open("wb") as file:
        kept = KeptPrompt(file.fileno(), spec, N_TOKENS)
        for start in range(0, N_TOKENS, 100):
            assert not kept.is_whole
            fill(kept, spec, range(start, start + 100))
        assert kept.is_whole, "the file is complete before the sequence ends"
        for _ in range(n_more):
            kept.add_chosen(0, np.zeros((1, spec.n_active), np.int32))
    with np.load(tmp_path / "kept.npz") as found:
        assert found["logits"].shape == (N_TOKENS, spec.vocabulary_size)
        assert (found["logits"].dtype, found["topk"].dtype) == (np.float32, np.int16)
        assert (found["logits"] == np.arange(N_TOKENS)[:, None]).all()
        assert found["topk"].shape == (spec.n_layers, N_TOKENS, spec.n_active)
        layers = np.arange(spec.n_layers)[:, None, None]
        assert (found["topk"] == np.arange(N_TOKENS)[None, :, None] + layers).all()
    kept.close()
    assert (tmp_path / "kept.npz").stat().st_size > 0


def test_logits_are_not_held(spec: ModelSpec, tmp_path: Path) -> None:
    """As much as is planned for, however long the prompt is."""
    assert footprint.KEPT_ROWS == KEPT_ROWS
    n_tokens = 40 * KEPT_ROWS
    with (tmp_path / "kept.npz").open("wb") as file:
        kept = KeptPrompt(file.fileno(), spec, n_tokens)
        tracemalloc.start()
        for start in range(0, n_tokens, 4 * KEPT_ROWS):
            fill(kept, spec, range(start, start + 4 * KEPT_ROWS))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert kept.is_whole
    # a chunk's logits are there as whole numbers too
    assert peak_bytes < 4 * footprint.kept_bytes(spec, n_tokens)
    assert peak_bytes < 4 * n_tokens * spec.vocabulary_size / 3


def test_a_part_of_a_prompt_leaves_an_empty_file(spec: ModelSpec, tmp_path: Path) -> None:
    with (tmp_path / "kept.npz").open("wb") as file:
        kept = KeptPrompt(file.fileno(), spec, N_TOKENS)
        fill(kept, spec, range(100))
        assert (tmp_path / "kept.npz").stat().st_size > 90 * 4 * spec.vocabulary_size
        kept.close()
    assert (tmp_path / "kept.npz").stat().st_size == 0


def test_what_a_compute_wrote_that_was_killed_is_not_left(tmp_path: Path) -> None:
    out = tmp_path / "kept.npz"
    model = tiny_model(tmp_path / "long.gguf", width=128, context_length=4096)
    tokens = ",".join(str(token % 100) for token in range(3000))
    flags = ("--tokens", tokens, "--out", str(out), "--context", "3100", "--chunk", "64")
    with RunningProgram("eval", str(model), *flags) as run:
        wait_until(lambda: out.exists() and out.stat().st_size > 0)
        os.kill(run.children()["compute"], signal.SIGKILL)
        assert run.end() == 5
        assert "the compute worker died" in run.errors().splitlines()[-1]
    assert out.stat().st_size == 0


def test_a_full_disk_is_one_line(model: Path, spec: ModelSpec) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    kept = KeptPrompt(fd, spec, N_TOKENS)
    with pytest.raises(KeptFileError, match="--out: cannot write the file: No space left"):
        fill(kept, spec, range(N_TOKENS))
    kept.close()
    os.close(fd)
    done = run_program("eval", str(model), "--tokens", "5,6,7,8,9,10,11,12", "--out", "/dev/full")
    assert done.returncode == 5
    assert "--out: cannot write the file: No space left" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
