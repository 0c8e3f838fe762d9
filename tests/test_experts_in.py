"""Who may keep experts in compute's own memory."""

import dataclasses
from pathlib import Path

import pytest
from gguf_builder import tiny_model

from compute_worker.arch import ModelSpec
from compute_worker.arch import resolve as resolve_model
from coordinator.command.config import Config
from coordinator.plan.budget import MemoryPlan, MemoryRequest, plan_memory
from coordinator.plan.experts_in import ROOM_BYTES, WORTH_A_TRIAL_BYTES, experts_in
from coordinator.processes.available_memory import AvailableMemory
from coordinator.processes.limits import ResourceError
from io_worker.model_file import open_model

ASKED = MemoryRequest(None, None, None, None, "f16", 1, 2)
USAGE, TRACE = Path("counts.json"), Path("routing.trace")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return resolve_model(open_model(tiny_model(tmp_path_factory.mktemp("in") / "m.gguf")))


def large(spec: ModelSpec) -> ModelSpec:
    """The same with experts of half a gigabyte, as far as the table says."""
    factor = 2 * WORTH_A_TRIAL_BYTES // spec.slabs.total_bytes + 1
    layers = tuple(
        dataclasses.replace(
            layer,
            **{
                name: dataclasses.replace(part, bytes_per_expert=part.bytes_per_expert * factor)
                for name, part in (("gate", layer.gate), ("up", layer.up), ("down", layer.down))
            },
        )
        for layer in spec.slabs.layers
    )
    return dataclasses.replace(spec, slabs=dataclasses.replace(spec.slabs, layers=layers))


def plan_of(spec: ModelSpec, spare_bytes: int | None = None) -> MemoryPlan:
    """A plan with room for all experts, and so much beside it (None: very much)."""
    ample = plan_memory(ASKED, spec, AvailableMemory(1 << 36, "a test"))
    if spare_bytes is None:
        return ample
    return dataclasses.replace(ample, budget_bytes=ample.total_bytes + spare_bytes)


@pytest.mark.parametrize(
    ("asked", "others", "expected"),
    [
        ("auto", {}, "auto"),
        ("pool", {}, "pool"),
        ("own", {}, "own"),
        ("auto", {"usage": USAGE}, "pool"),
        ("auto", {"trace": TRACE}, "pool"),
        ("auto", {"reader": "mmap"}, "none"),
        ("pool", {"reader": "populate"}, "none"),
    ],
)
def test_a_large_model_that_fits(
    spec: ModelSpec, asked: str, others: dict[str, Path | str], expected: str
) -> None:
    config = dataclasses.replace(Config(experts_in=asked), **others)
    assert experts_in(config, plan_of(large(spec)), large(spec)) == expected


def test_a_small_model_is_not_worth_a_trial(spec: ModelSpec) -> None:
    assert experts_in(Config(), plan_of(spec), spec) == "pool"
    assert experts_in(Config(experts_in="own"), plan_of(spec), spec) == "own"


def test_without_room_to_move_experts_stay_in_the_pool(spec: ModelSpec) -> None:
    model = large(spec)
    tables = model.slabs.total_bytes // 512 + 1
    assert experts_in(Config(), plan_of(model, ROOM_BYTES + tables), model) == "auto"
    tight = plan_of(model, ROOM_BYTES)
    assert experts_in(Config(), tight, model) == "pool"
    with pytest.raises(ResourceError, match="--experts-in: expected room for all"):
        experts_in(Config(experts_in="own"), tight, model)


def test_experts_that_do_not_all_fit_stay_in_the_pool(spec: ModelSpec) -> None:
    model = large(spec)
    plan = plan_of(model)
    part = plan_memory(
        dataclasses.replace(ASKED, memory_bytes=plan.total_bytes - plan.pool_bytes // 2),
        model,
        AvailableMemory(1 << 36, "a test"),
    )
    assert not part.everything_fits
    assert experts_in(Config(), part, model) == "pool"
