import dataclasses
import json
from pathlib import Path

import pytest
from gguf_builder import tiny_model

from compute_worker.arch import ModelSpec
from compute_worker.arch import resolve as resolve_model
from coordinator.command.config import Config, shipped_model
from coordinator.command.flags import flags_of, settings_of
from coordinator.command.sizes import PoolSize
from coordinator.plan.machine import Machine
from coordinator.processes.available_memory import AvailableMemory
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
        "kernels", "pin-cores", "core-plan", "mlock", "usage", "hot-set", "imatrix",
        "trace", "csv", "metrics-port",
        "host", "port", "json", "drop-cache", "api-key", "without-key", "allow-host",
        "allow-origin", "alias", "parallel", "queue", "drain", "session", "metrics-host",
        "notify-socket", "model-cache", "experts-in", "poll",
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
