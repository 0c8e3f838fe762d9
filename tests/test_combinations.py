from pathlib import Path
from typing import Any

import pytest

from coordinator.command.combinations import combined, flag_name
from coordinator.command.config import Config
from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import PoolSize

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


PAGE_CACHE_READERS = ("mmap", "willneed", "populate")


@pytest.mark.parametrize("reader", PAGE_CACHE_READERS)
@pytest.mark.parametrize(
    "wish",
    [
        {"pool": PoolSize(share=0.5)},
        {"policy": "auto"},
        {"drop_cache": "yes"},
        {"read_unit": "expert"},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_the_page_cache_takes_no_orders(reader: str, wish: dict[str, Any]) -> None:
    (name,) = wish
    with pytest.raises(ConfigError, match=f"{flag_name(name)}: .* found --reader {reader}"):
        combined(Config(reader=reader, **wish), frozenset({"reader", name}), CORES)
    assert combined(Config(reader=reader), frozenset({"reader"}), CORES).reader == reader


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"queue_depth": 4}, "--queue-depth: expected 1 with --reader mmap"),
        ({"io_threads": 2}, "--io-threads: expected 1 with --reader mmap"),
        ({"io_workers": 0, "prefetch": "router"}, "--prefetch: expected something that reads"),
        ({"single_process": True, "prefetch": "router"}, "--prefetch: expected something"),
        ({"queue_depth": 1}, None),
        ({"io_threads": 1, "prefetch": "router"}, None),
        ({"io_workers": 0}, None),
        ({"io_workers": 3, "prefetch": "previous-token"}, None),
    ],
)
def test_touching_is_one_page_at_a_time(settings: dict[str, Any], problem: str | None) -> None:
    config, given = Config(reader="mmap", **settings), frozenset({"reader", *settings})
    if problem is not None:
        with pytest.raises(ConfigError, match=problem):
            combined(config, given, CORES)
    else:
        assert combined(config, given, CORES).queue_depth == 1


def test_who_faults_and_who_has_a_pool() -> None:
    assert Config(reader="mmap", io_workers=0).only_faults
    assert not Config(reader="mmap", io_workers=0, io_threads=1).only_faults
    assert not Config(reader="willneed", io_workers=0).only_faults
    assert not Config(io_workers=0).only_faults
    assert [Config(reader=r).has_pool for r in ("auto", "direct", "buffered")] == [True] * 3
    assert not any(Config(reader=reader).has_pool for reader in PAGE_CACHE_READERS)


def test_mapped_weights_cannot_be_locked() -> None:
    given = frozenset({"dense", "mlock"})
    with pytest.raises(ConfigError, match=r"--mlock: .* --dense mapped"):
        combined(Config(dense="mapped", mlock="require"), given, CORES)
    assert combined(Config(dense="mapped"), given, CORES).dense == "mapped"


def test_metrics_are_of_processes() -> None:
    given = frozenset({"single_process", "metrics_port"})
    with pytest.raises(ConfigError, match="--metrics-port: expected processes to watch"):
        combined(Config(single_process=True, metrics_port=9400), given, CORES)
    assert combined(Config(metrics_port=9400), given, CORES).metrics_port == 9400


def test_there_is_nobody_to_wait_for_in_a_single_process() -> None:
    given = frozenset({"single_process", "poll"})
    with pytest.raises(ConfigError, match="--poll on: expected processes to wait for"):
        combined(Config(single_process=True, poll="on"), given, CORES)
    assert combined(Config(single_process=True, poll="off"), given, CORES).poll == "off"


def test_flag_names() -> None:
    assert flag_name("memory_bytes") == "--memory"
    assert flag_name("prompt") == "--prompt"


@pytest.mark.parametrize(
    ("wishes", "part"),
    [
        ({"usage": "u", "hot_set": "h"}, "found --usage and --hot-set"),
        ({"hot_set": "h", "imatrix": "i"}, "found --hot-set and --imatrix"),
        ({"policy": "static"}, "expected counts for static"),
        ({"policy": "imatrix"}, "expected --imatrix FILE"),
        ({"policy": "imatrix", "hot_set": "h"}, "expected --imatrix FILE"),
        ({"policy": "lru", "hot_set": "h"}, "which would not look at it"),
        ({"policy": "slru", "imatrix": "i"}, "which would not look at it"),
    ],
)
def test_counts_come_from_one_file_and_are_made_use_of(wishes: dict[str, str], part: str) -> None:
    paths = {name: Path(value) for name, value in wishes.items() if name != "policy"}
    policy = wishes.get("policy", "auto")
    with pytest.raises(ConfigError, match=part):
        combined(Config(policy=policy, **paths), frozenset(wishes), CORES)


@pytest.mark.parametrize("policy", ["auto", "lfu", "static", "calibrated"])
@pytest.mark.parametrize("source", ["usage", "hot_set", "imatrix"])
def test_policies_that_count_take_counts_from_anywhere(policy: str, source: str) -> None:
    config = Config(policy=policy, **{source: Path("f")})
    assert combined(config, frozenset({"policy", source}), CORES) == config


def test_usage_is_saved_under_any_policy() -> None:
    config = Config(policy="lru", usage=Path("u"))
    assert combined(config, frozenset({"policy", "usage"}), CORES) == config
