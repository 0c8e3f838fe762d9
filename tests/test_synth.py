import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compute_worker.arch import resolve
from coordinator.command.commands import SYNTH_MIXES, SYNTH_SHAPES, SynthCommand
from coordinator.command.flag_values import ConfigError
from coordinator.models.synth import MIXES, SHAPES, Model, run_synth, write_model
from coordinator.processes.limits import ResourceError
from io_worker.ggml_types import GGML_TYPES
from io_worker.model_file import open_model

ROOT = Path(__file__).parent.parent


def small(shape: str, mix: str, n_layers: int = 8) -> Model:
    """A model with the architecture of `shape` and everything else small."""
    reduced = dataclasses.replace(
        SHAPES[shape],
        width=256,
        n_heads=2,
        n_kv_heads=2,
        n_experts=8,
        n_active=2,
        expert_width=256,
        vocabulary_size=1024,
    )
    return Model("small", reduced, MIXES[mix], n_layers)


def write(path: Path, model: Model, *, sparse: bool = False, force: bool = False) -> int:
    return write_model(path, model, sparse=sparse, force=force, report=lambda done, total: None)


def test_the_tables_are_those_that_the_command_offers() -> None:
    assert set(SHAPES) == set(SYNTH_SHAPES)
    assert set(MIXES) == set(SYNTH_MIXES)


@pytest.mark.parametrize("shape", ["olmoe", "qwen3moe"])
@pytest.mark.parametrize("mix", SYNTH_MIXES)
def test_a_model_passes_the_strict_reader(tmp_path: Path, shape: str, mix: str) -> None:
    path = tmp_path / "m.gguf"
    done: list[tuple[int, int]] = []
    model = small(shape, mix)
    total = write_model(
        path, model, sparse=False, force=False, report=lambda now, all: done.append((now, all))
    )
    assert path.stat().st_size == total
    assert done[-1] == (total, total)
    assert [now for now, _ in done] == sorted(now for now, _ in done)
    spec = resolve(open_model(path))
    assert (spec.arch, spec.n_layers, spec.n_experts) == (shape, 8, 8)
    used = {(GGML_TYPES[x.gate.type].name, GGML_TYPES[x.down.type].name) for x in spec.slabs.layers}
    assert (
        used
        == {
            "q4_k_m": {("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")},
            "q2_k": {("Q2_K", "Q3_K")},
            "mxfp4": {("MXFP4", "MXFP4")},
        }[mix]
    )
    assert list(tmp_path.iterdir()) == [path]


def test_the_layers_that_keep_more_bits_are_those_of_real_files(tmp_path: Path) -> None:
    """OLMoE-1B-7B Q4_K_M keeps `down` in Q6_K in 8 of its 16 layers."""
    write(tmp_path / "m.gguf", small("olmoe", "q4_k_m", 16), sparse=True)
    slabs = resolve(open_model(tmp_path / "m.gguf")).slabs
    better = [x.layer for x in slabs.layers if GGML_TYPES[x.down.type].name == "Q6_K"]
    assert better == [0, 1, 4, 7, 10, 13, 14, 15]


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, small("qwen3moe", "q4_k_m", 1))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("shape", "n_bytes", "n_layers", "cycle_mib"),
    [
        ("olmoe", 4_212_000_000, 16, 465),
        ("qwen3moe", 18_600_000_000, 48, 1046),
        ("qwen3moe-235b", 142_000_000_000, 94, 8000),
    ],
)
def test_a_sparse_file_has_the_real_size_and_takes_no_room(
    tmp_path: Path, shape: str, n_bytes: int, n_layers: int, cycle_mib: int
) -> None:
    path = tmp_path / "m.gguf"
    run_synth(SynthCommand(shape, "q4_k_m", path, sparse=True))
    assert abs(path.stat().st_size / n_bytes - 1) < 0.01
    assert path.stat().st_blocks * 512 < 16 << 20
    spec = resolve(open_model(path))
    assert spec.n_layers == n_layers
    cycle = spec.n_active * sum(layer.slab_bytes for layer in spec.slabs.layers)
    assert abs(cycle / (cycle_mib << 20) - 1) < 0.03


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="--force writes over it"):
        write(path, small("olmoe", "q2_k", 1))
    assert path.read_bytes() == b"precious"
    write(path, small("olmoe", "q2_k", 1), force=True)
    assert open_model(path).metadata["general.name"] == "small"


@pytest.mark.parametrize(
    ("name", "part"),
    [("none/m.gguf", "expected a folder"), (".", "give the name of a file")],
)
def test_bad_places(tmp_path: Path, name: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        write(tmp_path / name, small("olmoe", "q2_k", 1), force=True)
    assert part in str(caught.value)


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """1,000 layers of the largest shape are 1.5 TB, and more than any disk of a test."""
    command = SynthCommand("qwen3moe-235b", "q4_k_m", tmp_path / "m.gguf", layers=1000)
    with pytest.raises(ResourceError) as caught:
        run_synth(command)
    assert "free on its disk, found" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The file would take half a minute; it is stopped as soon as something is there."""
    command = ["synth", "olmoe", "q4_k_m", str(tmp_path / "m.gguf")]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "coordinator", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    part = tmp_path / "m.gguf.part"
    deadline = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size > 1 << 20) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    assert not list(tmp_path.iterdir())
