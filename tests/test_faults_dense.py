"""Dense weights and embedding rows that the disk cannot give."""

from pathlib import Path

import pytest
from arms import run_program, spelled
from bad_disk import break_bytes
from faults import session
from gguf_builder import tiny_model

from compute_worker.arch import ModelSpec, resolve
from io_worker.model_file import open_model

BAD_TOKEN, WIDTH = 200, 1024  # a row is a page or more: the next token's is a good one
PROMPT, BAD_PROMPT = [5, 6, 7], [5, BAD_TOKEN, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_model(folder / "wide.gguf", n_layers=2, quantisation="F32", width=WIDTH)


@pytest.fixture
def spec(model: Path) -> ModelSpec:
    return resolve(open_model(model))


@pytest.fixture
def bad_row(spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = spec.token_embedding
    stride = info.n_bytes // info.shape[1]
    break_bytes(monkeypatch, tmp_path, info, BAD_TOKEN * stride, (BAD_TOKEN + 1) * stride)


@pytest.mark.usefixtures("bad_row")
def test_a_prompt_with_a_token_that_cannot_be_read_ends_alone(model: Path) -> None:
    with session(model) as run:
        run.submit(1, PROMPT, 4)
        assert len(run.finish(1)) == 4
        for request in range(2, 10):  # more than the deaths that end the engine
            run.submit(request, BAD_PROMPT, 4)
            assert run.finish(request) == []
            error = run.listener.ended[request].error
            assert error is not None
            assert error.startswith("token_embd.weight: ")
            assert error.endswith("Input/output error")
        run.submit(10, PROMPT, 4)
        assert len(run.finish(10)) == 4
        assert run.engine.restarts.counts == {}
        run.check_idle()


def test_a_drawn_token_that_cannot_be_read_ends_its_answer(
    model: Path, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute looks ahead for it while nobody waits, and says so only when it is asked for."""
    info = spec.token_embedding
    stride = info.n_bytes // info.shape[1]
    break_bytes(monkeypatch, tmp_path, info, 10 * stride, info.n_bytes - 2 * stride)
    with session(model) as run:
        for request in (1, 2):
            run.submit(request, PROMPT, 4)
            (drawn,) = run.finish(request)
            assert drawn >= 10
            assert "Input/output error" in str(run.listener.ended[request].error)
        assert run.engine.restarts.counts == {}
        run.check_idle()


@pytest.mark.usefixtures("bad_row")
@pytest.mark.parametrize("flags", [(), ("--single-process",)])
def test_the_command_says_which_row(model: Path, flags: tuple[str, ...]) -> None:
    run = ("--model", str(model), "--tokens", spelled(BAD_PROMPT), "-n", "2")
    done = run_program(*run, *flags)
    assert done.returncode == 5
    line = done.stderr.splitlines()[-1]
    assert line.startswith("moe-coord: error: token_embd.weight: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flags", [(), ("--single-process",)])
def test_dense_weights_that_cannot_be_read_end_the_start(
    model: Path,
    spec: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
) -> None:
    info = spec.layers[1].q
    break_bytes(monkeypatch, tmp_path, info, 0, info.n_bytes)
    done = run_program("--model", str(model), "--tokens", spelled(PROMPT), "-n", "2", *flags)
    assert done.returncode == 3
    line = done.stderr.splitlines()[-1]
    assert f"blk.1.attn_q.weight: {model}: cannot read" in line
    assert line.endswith("Input/output error")
    assert "Traceback" not in done.stderr
