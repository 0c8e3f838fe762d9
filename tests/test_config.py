import dataclasses
import json
from pathlib import Path

import pytest
from gguf_builder import tiny_model

from compute_worker.arch import ModelSpec
from compute_worker.arch import resolve as resolve_model
from coordinator.available_memory import AvailableMemory
from coordinator.config import Config, memory_plan, resolve, settings_of, shipped_model
from coordinator.flags import flags_of
from coordinator.machine import Machine
from coordinator.sizes import PoolSize
from coordinator.slot_classes import smallest_pool_bytes
from io_worker.model_file import open_model

MACHINE = Machine((0, 1), None, AvailableMemory(8 << 30, "MemAvailable in /proc/meminfo"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return resolve_model(open_model(tiny_model(tmp_path_factory.mktemp("config") / "m.gguf")))


def test_every_flag_of_the_main_job_is_declared() -> None:
    """The list of the design, so that none is lost."""
    wanted = {
        "model", "prompt", "file", "tokens", "max-tokens", "temperature", "top-k", "top-p",
        "min-p", "repeat-penalty", "seed", "stop", "ignore-eos", "io-workers", "io-threads",
        "single-process", "queue-depth", "reader", "read-unit", "policy", "prefetch", "pool",
        "memory", "dense", "context", "chunk", "kv-type", "compute-threads", "numerics",
        "kernels", "pin-cores", "core-plan", "mlock", "usage", "trace", "csv", "metrics-port",
        "host", "port", "json",
    }  # fmt: skip
    assert {flag.name for _, flag in flags_of(Config)} == {f"--{name}" for name in wanted}


def test_every_field_is_a_flag_with_a_help_and_names_of_its_own() -> None:
    flags = dict(flags_of(Config))
    assert list(flags) == [field.name for field in dataclasses.fields(Config)]
    names = [name for flag in flags.values() for name in flag.names]
    assert len(names) == len(set(names))
    for flag in flags.values():
        assert flag.help
        assert not flag.help.endswith(".")


def test_defaults_are_values_that_the_flag_takes() -> None:
    for field_name, flag in flags_of(Config):
        default = getattr(Config(), field_name)
        if flag.kind is not None and flag.kind.choices and default is not None:
            assert default in flag.kind.choices


def test_the_shipped_model_is_there_and_is_a_model() -> None:
    spec = resolve_model(open_model(shipped_model()))
    assert (spec.arch, spec.n_experts, spec.n_active) == ("olmoe", 16, 2)


def test_auto_becomes_what_machine_and_model_allow(model: ModelSpec) -> None:
    resolved = resolve(Config(seed=7), MACHINE, model)
    assert resolved.compute_threads == 2
    assert resolved.kv_type == "f16"
    assert resolved.policy == "lru"
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
        Config(memory_bytes=120 << 20),
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


def test_settings_are_json(model: ModelSpec) -> None:
    config = Config(
        model=Path("dir/ü.gguf"), prompt_tokens=(1, 2), stop=("a",), pool=PoolSize(share=0.4)
    )
    settings = json.loads(json.dumps(settings_of(config)))
    assert settings["model"] == "dir/ü.gguf"
    assert settings["tokens"] == [1, 2]
    assert settings["stop"] == ["a"]
    assert settings["pool"] == "40%"
    assert settings["top-p"] == 1.0
    assert settings["seed"] is None
