import dataclasses

import pytest
from gguf_builder import tiny_model

from compute_worker.arch import ModelSpec
from compute_worker.arch import resolve as resolve_model
from coordinator.command.config import Config
from coordinator.command.flags import settings_of
from coordinator.command.sizes import PoolSize
from coordinator.core.slot_classes import smallest_pool_bytes
from coordinator.plan.footprint import PANEL_BYTES
from coordinator.plan.machine import Machine
from coordinator.plan.resolve import memory_plan, resolve, spare_bytes
from coordinator.processes.available_memory import AvailableMemory
from coordinator.processes.limits import ResourceError
from io_worker.model_file import open_model
from io_worker.slabs import LayerSlabs

MACHINE = Machine((0, 1), None, AvailableMemory(8 << 30, "MemAvailable in /proc/meminfo"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return resolve_model(open_model(tiny_model(tmp_path_factory.mktemp("config") / "m.gguf")))


def test_auto_becomes_what_machine_and_model_allow(model: ModelSpec) -> None:
    resolved = resolve(Config(seed=7), MACHINE, model)
    assert resolved.compute_threads == 2
    assert resolved.kv_type == "f16"
    assert resolved.policy == "lfu"
    assert resolved.context_tokens == model.context_length
    assert resolved.pool is not None
    assert resolved.seed == 7
    assert resolved.core_plan is None
    assert resolve(Config(numerics="exact"), MACHINE, model).kv_type == "f32"


def test_a_resolved_config_has_no_auto_but_reader_and_kernels(model: ModelSpec) -> None:
    resolved = resolve(Config(pin_cores=True), MACHINE, model)
    auto = {name for name, value in settings_of(resolved).items() if value == "auto"}
    assert auto == {"reader", "kernels", "mlock"}
    assert resolved.core_plan == "compute=0,1,io=1,coordinator=1,http=1"


def test_resolving_twice_changes_nothing(model: ModelSpec) -> None:
    for config in (
        Config(),
        Config(pin_cores=True),
        Config(core_plan="split"),
        Config(memory_bytes=160 << 20),
        Config(pool=PoolSize(share=0.5), io_workers=0, io_threads=2),
        Config(single_process=True, io_workers=0),
    ):
        once = resolve(config, MACHINE, model)
        assert resolve(once, MACHINE, model) == once
        plan = dataclasses.replace(memory_plan(config, MACHINE, model), source="")
        assert dataclasses.replace(memory_plan(once, MACHINE, model), source="") == plan


def test_a_pool_below_the_token_cycle_gets_a_frequency_rule(model: ModelSpec) -> None:
    small = Config(pool=PoolSize(n_bytes=smallest_pool_bytes(model.slabs)))  # 2 slots; 4 are used
    assert resolve(small, MACHINE, model).policy == "lfu"
    assert resolve(dataclasses.replace(small, policy="lru"), MACHINE, model).policy == "lru"


def test_threads_follow_the_plan_and_the_quota(model: ModelSpec) -> None:
    four = Machine((0, 1, 2, 3), None, MACHINE.memory)
    assert resolve(Config(), four, model).compute_threads == 4
    assert resolve(Config(pin_cores=True), four, model).compute_threads == 3
    throttled = dataclasses.replace(four, quota_cores=1.5)
    assert resolve(Config(pin_cores=True), throttled, model).compute_threads == 2
    assert resolve(Config(compute_threads=7), throttled, model).compute_threads == 7


def test_a_seed_is_drawn_where_none_is_given(model: ModelSpec) -> None:
    seeds = {resolve(Config(), MACHINE, model).seed for _ in range(3)}
    assert len(seeds) == 3


def test_the_page_cache_is_not_in_the_budget(model: ModelSpec) -> None:
    config = Config(reader="willneed", memory_bytes=200 << 20)
    resolved = resolve(config, MACHINE, model)
    assert (resolved.policy, resolved.pool) == ("none", None)
    assert resolve(resolved, MACHINE, model) == resolved
    plan = memory_plan(config, MACHINE, model)
    assert plan.pool_bytes == 0 and not plan.everything_fits
    assert plan.layout.n_slots == 0
    assert plan.total_bytes <= 200 << 20
    assert "no pool (the page cache has the experts and is not counted here)" in plan.describe()
    assert plan.warning() is None


def test_weights_that_become_float32_need_room_for_a_panel(model: ModelSpec) -> None:
    config = Config(chunk_tokens=64)
    native = memory_plan(config, MACHINE, model)
    first, *rest = model.slabs.layers
    odd = dataclasses.replace(first, down=dataclasses.replace(first.down, type=34))  # TQ1_0
    slabs = dataclasses.replace(model.slabs, layers=(odd, *rest))
    for plan in (
        memory_plan(dataclasses.replace(config, kernels="numpy"), MACHINE, model),
        memory_plan(config, dataclasses.replace(MACHINE, has_native_kernels=False), model),
        memory_plan(config, MACHINE, dataclasses.replace(model, slabs=slabs)),
    ):
        assert plan.scratch_bytes == native.scratch_bytes + PANEL_BYTES


@pytest.mark.parametrize(
    ("config", "n_mappings"),
    [
        (Config(dense="mapped"), 1),
        (Config(reader="willneed", io_workers=3), 4),
        (Config(reader="populate", io_workers=0), 2),
        (Config(reader="mmap", io_workers=0), 1),
        (Config(reader="mmap", io_workers=0, io_threads=1), 2),
    ],
)
def test_page_tables_of_mapped_files_are_counted(
    model: ModelSpec, config: Config, n_mappings: int
) -> None:
    plan = memory_plan(config, MACHINE, model)
    without = memory_plan(
        dataclasses.replace(config, dense="anonymous", reader="direct"), MACHINE, model
    )
    experts = 0 if config.has_pool else model.slabs.total_bytes
    n_bytes = (experts + without.dense_bytes) * n_mappings
    assert plan.processes_bytes - without.processes_bytes == -(-n_bytes // 512)


def test_buffered_reads_stay_in_memory_that_nobody_uses(model: ModelSpec) -> None:
    tensor = dataclasses.replace(model.slabs.layers[0].gate, bytes_per_expert=8 << 20)
    layers = tuple(LayerSlabs(layer, tensor, tensor, tensor) for layer in range(2))
    model = dataclasses.replace(model, slabs=dataclasses.replace(model.slabs, layers=layers))
    config = Config(memory_bytes=200 << 20)
    total = memory_plan(config, MACHINE, model).total_bytes
    needed = total + model.slabs.total_bytes
    for available, expected in ((needed, "no"), (needed - 1, "yes")):
        machine = Machine((0, 1), None, AvailableMemory(available, "a test"))
        assert spare_bytes(machine, memory_plan(config, machine, model)) == available - total
        assert resolve(config, machine, model).drop_cache == expected
        for asked in ("yes", "no"):
            wish = dataclasses.replace(config, drop_cache=asked)
            assert resolve(wish, machine, model).drop_cache == asked


def test_dense_weights_that_do_not_fit_are_left_to_the_page_cache(model: ModelSpec) -> None:
    """An output head of 1 GiB in a budget of 600 MiB."""
    assert model.output is not None
    head = dataclasses.replace(model.output, n_bytes=1 << 30)
    heavy = dataclasses.replace(model, output=head)
    small = Config(memory_bytes=600 << 20)
    plan = memory_plan(small, MACHINE, heavy)
    assert plan.maps_dense
    assert plan.dense_bytes < 1 << 20, "norms and routers only"
    assert "left to the page cache and not counted" in plan.describe()
    resolved = resolve(small, MACHINE, heavy)
    assert resolved.dense == "mapped"
    assert resolve(resolved, MACHINE, heavy) == resolved
    large = resolve(dataclasses.replace(small, memory_bytes=2 << 30), MACHINE, heavy)
    assert large.dense == "anonymous"
    for asked in (
        {"dense": "anonymous"},
        {"mlock": "require"},
        {"pool": PoolSize(share=1.0)},
        {"context_tokens": 64},
    ):
        with pytest.raises(ResourceError, match="dense weights 1"):
            memory_plan(dataclasses.replace(small, **asked), MACHINE, heavy)


@pytest.mark.parametrize(
    ("asked", "polls"),
    [
        (Config(), "on"),
        (Config(pin_cores=True), "on"),
        (Config(io_workers=0), "on"),
        (Config(io_workers=0, io_threads=2), "off"),
        (Config(io_workers=0, single_process=True), "off"),
        (Config(core_plan="compute=0,io=0"), "off"),
        (Config(poll="off"), "off"),
        (Config(io_workers=0, io_threads=2, poll="on"), "on"),
    ],
)
def test_compute_polls_where_it_disturbs_nobody(
    model: ModelSpec, asked: Config, polls: str
) -> None:
    assert resolve(asked, MACHINE, model).poll == polls


def test_compute_does_not_poll_on_the_only_core(model: ModelSpec) -> None:
    assert resolve(Config(), dataclasses.replace(MACHINE, cores=(0,)), model).poll == "off"
