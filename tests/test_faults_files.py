"""What happens to a run when its model file changes, moves or goes away under it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import long_model, pressed_model, session
from running_program import RunningProgram

from coordinator.processes.engine import EngineError

PROMPT = list(range(30, 60))
N_NEW = 12
SMALLEST = ("--pool", "15%")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(original: Path) -> list[int]:
    with session(original, *SMALLEST) as run:
        run.submit(1, PROMPT, N_NEW)
        return run.finish(1)


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy that may be hurt."""
    return Path(shutil.copy(original, tmp_path / "model.gguf"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\0")


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize("change", [truncate, overwrite, append])
@pytest.mark.parametrize(
    "flags", [("--reader", "direct"), ("--reader", "buffered"), ("--io-threads", "2")]
)
def test_a_file_that_is_written_to_ends_the_run(
    model: Path, expected: list[int], change: Callable[[Path], None], flags: tuple[str, ...]
) -> None:
    with session(model, *SMALLEST, *flags) as run:
        run.submit(1, PROMPT, 10 * N_NEW)
        run.run_until(lambda: len(run.listener.tokens.get(1, [])) >= 3)
        change(model)
        with pytest.raises(EngineError) as caught:
            run.run_until_error()
        assert caught.value.exit_code == 3
        assert "model changed on disk" in str(caught.value)
        assert "\n" not in str(caught.value)
        drawn = run.listener.tokens[1][:N_NEW]
        if change is not overwrite:  # it is seen within 100 ms, not at once
            assert drawn == expected[: len(drawn)]


@pytest.mark.parametrize("change", [truncate, overwrite])
def test_a_run_that_reads_no_more_sees_it_too(model: Path, change: Callable[[Path], None]) -> None:
    """Everything is resident: only the rows of the embedding still come from the file."""
    with session(model, "--pool", "all") as run:
        run.submit(1, PROMPT, 2)
        run.finish(1)
        change(model)
        with pytest.raises(EngineError) as caught:
            run.run_until_error()
        assert caught.value.exit_code == 3
        assert "model changed on disk" in str(caught.value)


def delete(path: Path) -> None:
    path.unlink()


def rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere.gguf"))


def replace(path: Path) -> None:
    """As a careful editor or a download does: a new file under the old name."""
    other = path.with_name("new.gguf")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


def forbid(path: Path) -> None:
    path.chmod(0)


@pytest.mark.parametrize("change", [delete, rename, replace, forbid])
def test_a_file_that_only_loses_its_name_goes_on(
    model: Path, expected: list[int], change: Callable[[Path], None]
) -> None:
    with session(model, *SMALLEST) as run:
        run.submit(1, PROMPT, N_NEW)
        run.run_until(lambda: len(run.listener.tokens.get(1, [])) >= 3)
        change(model)
        run.run_until_reading("io0")
        run.kill("io0")  # the next one must get the descriptor, not the path
        assert run.finish(1) == expected
        run.kill("compute")  # the dense weights are read through it too
        run.run_until(lambda: not run.engine.is_up("compute"))  # its requests would end with it
        run.submit(2, PROMPT, N_NEW)
        assert len(run.finish(2)) == N_NEW
        run.check_idle()


def test_the_command_says_that_the_model_changed(tmp_path: Path) -> None:
    model = long_model(tmp_path)
    flags = ("--tokens", "5,6", "-n", "30000", "--ignore-eos", "--context", "30100")
    with RunningProgram("--model", str(model), *flags, "--pool", "30%") as run:
        run.wait_for_output()
        truncate(model)
        assert run.end() == 3
        last = run.errors().splitlines()[-1]
        assert last.startswith("moe-coord: error: ")
        assert "model changed on disk" in last
        assert str(model) in last
        run.check_gone()
