"""An install without a C compiler: it succeeds, and runs on the numpy references."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("shm", "io_worker", "compute_worker", "coordinator", "pyproject.toml")
ASK = """
import numpy as np
from compute_worker import kernel_choice, native_kernels
from compute_worker.matrix import Matrix
kernels = kernel_choice.select("auto", "fast", 2)
weights = np.eye(2, dtype=np.float32).view(np.uint8).ravel()
print(kernels.matmul(Matrix(weights, 0, 2, 2), np.ones((1, 2), np.float32)))
print(kernels.name, "|", native_kernels.unavailable_reason(), "|", native_kernels.__file__)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources without what was built in place: an install writes beside them."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    (copy / "README.md").write_text("")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "*.gguf")
            )
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


def test_no_compiler(checkout: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation"]
    command += ["--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target)]
    environment = os.environ | {"CC": "/bin/false"}
    subprocess.run([*command, str(checkout)], env=environment, check=True, timeout=250)
    assert not list(target.rglob("*.so"))
    ask = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(target)!r})\n{ASK}"]
    answer = subprocess.run(
        ask, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=100
    )
    assert answer.stdout.startswith("[[1. 1.]]\nnumpy (no compiler at install")
    assert str(target) in answer.stdout
