import pytest

from coordinator.combinations import combined, flag_name
from coordinator.config import Config
from coordinator.flag_values import ConfigError

CORES = (0, 1)


def test_a_default_is_never_a_wish() -> None:
    """The default of one I/O worker gives way; one that was typed does not."""
    config = Config(io_threads=2)
    assert combined(config, frozenset({"io_threads"}), CORES).io_workers == 0
    with pytest.raises(ConfigError):
        combined(config, frozenset({"io_threads", "io_workers"}), CORES)


def test_a_queue_depth_that_was_not_typed_does_not_matter() -> None:
    assert combined(Config(io_workers=0), frozenset({"io_workers"}), CORES).queue_depth == 4


def test_a_core_plan_pins_and_is_checked_against_these_cores() -> None:
    config = Config(core_plan="compute=3,io=2")
    assert combined(config, frozenset({"core_plan"}), (2, 3)).pin_cores
    with pytest.raises(ConfigError, match="out of 0,1"):
        combined(config, frozenset({"core_plan"}), CORES)


def test_one_core_is_enough() -> None:
    for plan in (None, "shared", "split", "last"):
        assert combined(Config(pin_cores=True, core_plan=plan), frozenset(), (5,)).pin_cores


def test_flag_names() -> None:
    assert flag_name("memory_bytes") == "--memory"
    assert flag_name("prompt") == "--prompt"
