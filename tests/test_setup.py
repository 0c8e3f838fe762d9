"""From a config to the core of a run: what is planned is what the core works on."""

import dataclasses
import gc
from pathlib import Path

import pytest
from arms import exact_config
from faults import open_descriptors
from gguf_builder import tiny_model

from coordinator.command.flag_values import ConfigError
from coordinator.plan.machine import read_machine
from coordinator.plan.setup import Setup, build_core, prepared
from io_worker.gguf_header import ModelFormatError
from io_worker.reader import ModelFileError
from shm.pool import ALIGNMENT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of two slab sizes."""
    folder = tmp_path_factory.mktemp("model")
    return tiny_model(folder / "tiny.gguf", n_layers=4, quantisation="Q4_K_M", n_active=3)


def setup_of(model: Path, *flags: str) -> Setup:
    with prepared(exact_config(model, flags), read_machine()) as setup:
        return setup


@pytest.mark.parametrize("flags", [("--pool", "all"), ("--pool", "40%"), ("--single-process",)])
def test_the_core_sees_the_pool_that_is_made(model: Path, flags: tuple[str, ...]) -> None:
    setup = setup_of(model, *flags)
    core = build_core(setup)
    layout, geometry = setup.plan.layout, core.residency.geometry
    assert len(core.residency.slots.slots) == layout.n_slots
    slabs = setup.spec.slabs
    assert sorted(geometry.class_of_layer) == [layer.layer for layer in slabs.layers]
    for layer in slabs.layers:
        windows = layout.classes[geometry.class_of_layer[layer.layer]].windows
        for expert in range(slabs.n_experts):
            ranges = geometry.ranges_of(layer.layer, expert)
            assert ranges == tuple((r.file, r.offset, r.n_bytes) for r in layer.ranges(expert))
            for (_, offset, n_bytes), window in zip(ranges, windows, strict=True):
                assert offset % ALIGNMENT + n_bytes <= window


@pytest.mark.parametrize(
    ("flags", "in_flight"),
    [
        (("--io-workers", "1"), 4),
        (("--io-workers", "3", "--queue-depth", "2"), 6),
        (("--io-workers", "0"), 1),
        (("--io-threads", "5"), 5),
        (("--single-process",), 1),
    ],
)
def test_reads_in_flight(model: Path, flags: tuple[str, ...], in_flight: int) -> None:
    assert setup_of(model, *flags).reads_in_flight == in_flight


def test_the_lines_of_a_run_say_how_it_runs(model: Path) -> None:
    text = "\n".join(setup_of(model, "--io-workers", "2", "--pin-cores").lines())
    for part in ("olmoe, 4 layers", "2 I/O worker", "reader", "policy", "memory:", "cores"):
        assert part in text


@pytest.mark.parametrize(
    ("text", "name"), [(None, "shared"), ("split", "split"), ("compute=0,io=1", "chosen")]
)
def test_a_named_plan_keeps_its_name(model: Path, text: str | None, name: str) -> None:
    """Settings have it spelled out, the line says how it was asked for."""
    config = dataclasses.replace(exact_config(model, ()), pin_cores=True, core_plan=text)
    machine = dataclasses.replace(read_machine(), cores=(0, 1))
    with prepared(config, machine) as setup:
        assert setup.cores is not None
        assert any(f"cores ({name}): " in line for line in setup.lines())
        assert setup.config.core_plan == str(setup.cores)


def test_what_cannot_work_leaves_nothing_open(model: Path, tmp_path: Path) -> None:
    gc.collect()  # what earlier tests left is not closed in between
    before = open_descriptors()
    with pytest.raises(ConfigError, match="--pool"):
        setup_of(model, "--pool", "10K")
    with pytest.raises((ModelFileError, ModelFormatError)):
        setup_of(tmp_path / "nothing.gguf")
    with pytest.raises(ConfigError, match="--context"):
        setup_of(model, "--context", "100000")
    assert open_descriptors() == before
