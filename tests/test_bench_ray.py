"""The same comparison on two nodes of a real Ray cluster on this machine."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from arms import PROGRAM

from coordinator.bench_ray import with_whole_paths, without
from coordinator.command.config import shipped_model

RAY_SECONDS = 300


@pytest.fixture
def address() -> Iterator[str]:
    utilities = pytest.importorskip(
        "ray.cluster_utils", reason="needs the extra: pip install 'moe-coord[ray]'"
    )
    cluster = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def test_flags_that_are_not_for_the_nodes() -> None:
    typed = ["bench", "m", "--ray", "a:1", "--out=x", "--pairs", "2", "--out", "y"]
    assert without(typed, ("--ray", "--out")) == ["bench", "m", "--pairs", "2"]


def test_models_have_paths_that_hold_on_every_node() -> None:
    whole = str(Path("m.gguf").absolute())
    typed = ["bench", "m.gguf", "--pairs", "2", "/n.gguf", "bench"]
    found = with_whole_paths(typed, (Path("m.gguf"), Path("/n.gguf"), Path("bench")))
    assert found == ["bench", whole, "--pairs", "2", "/n.gguf", str(Path("bench").absolute())]


@pytest.mark.timeout(RAY_SECONDS)
@pytest.mark.filterwarnings("default")
def test_two_nodes(address: str, tmp_path: Path) -> None:
    arms = ["--arm", "a: --io-workers 0", "--arm", "b: --io-workers 1"]
    how = ["--pairs", "1", "-n", "4", "--warm-up", "1", "--keep-cache", "--out", str(tmp_path)]
    done = subprocess.run(
        [*PROGRAM, "bench", shipped_model().name, *arms, *how, "--ray", address],
        capture_output=True, text=True, timeout=RAY_SECONDS, check=False,
        cwd=shipped_model().parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = {path.name for path in tmp_path.glob("*.jsonl")} - {"merged.jsonl"}
    assert len(files) == 2
    assert "(2 runs):" in done.stdout  # two nodes of one kind of hardware: one row
    (kind,) = json.loads((tmp_path / "answers.json").read_text())["kinds"]
    assert kind["claims"][0]["findings"][0]["n_pairs"] == 2


def test_no_cluster_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'moe-coord[ray]'")
    done = subprocess.run(
        [*PROGRAM, "bench", str(shipped_model()), "--ray", "127.0.0.1:1"],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    assert (done.returncode, done.stderr.count("\n")) == (4, 1)
    assert "expected a cluster" in done.stderr
