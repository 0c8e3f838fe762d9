"""Every preset: its arms are legal, and those of a pair differ in nothing but what it is about."""

from pathlib import Path

import pytest

from coordinator.bench.arms import check_arm
from coordinator.bench.questions import BEST_ARM, SWEEPS, Setting, Sweep, sweep_of
from coordinator.bench.rooms import Room
from coordinator.command.bench_commands import QUESTIONS, Arm, BenchCommand
from coordinator.command.config import Config
from coordinator.command.cores import usable_cores
from coordinator.command.flag_values import ConfigError
from coordinator.command.line import parse

ROOMS = (Room("a cap", ("--memory", "800M"), 1 << 30), Room("another", ("--memory", "2G"), 3 << 30))
UNEQUAL_ON_PURPOSE = {("process", "inline")}  # the pair's words say how many reads each has


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, ...]:
    paths = []
    for name, size in (("small.gguf", 10), ("large.gguf", 30)):
        (tmp_path / name).write_bytes(bytes(size))
        paths.append(tmp_path / name)
    return tuple(paths)


def sweep(
    question: str,
    files: tuple[Path, ...],
    *,
    has_caps: bool = True,
    cores: tuple[int, ...] = (),
) -> Sweep:
    models = files if question == "quant" else files[:1]
    cores = cores or usable_cores()
    return sweep_of(
        BenchCommand(models, question=question),
        Setting(ROOMS, models, len(cores), cores, has_caps),
    )


def config_of(arm: Arm) -> Config:
    config = parse([*arm.flags, "--tokens", "0"])
    assert isinstance(config, Config)
    return config


def reads_in_flight(config: Config) -> int:
    if config.io_workers:
        return config.io_workers * config.queue_depth
    return max(1, config.io_threads)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_arms_are_legal_and_each_pair_is_fair(question: str, files: tuple[Path, ...]) -> None:
    found = sweep(question, files)
    arms = {arm.name: arm for arm in found.arms}
    assert len(arms) == len(found.arms) and BEST_ARM[question] in arms
    for arm in found.arms:
        check_arm(arm)
    for pair in found.pairs:
        one, other = config_of(arms[pair.arm]), config_of(arms[pair.reference])
        if (pair.arm, pair.reference) not in UNEQUAL_ON_PURPOSE:
            assert reads_in_flight(one) == reads_in_flight(other), pair
        assert one.pin_cores == other.pin_cores or "pin" in pair.subject
        assert one.prefetch == other.prefetch or "prefetch" in pair.subject
        if one.compute_threads != other.compute_threads:
            assert pair.subject.endswith(f" (compute threads: {one.compute_threads})")
            assert pair.than.endswith(f" ({other.compute_threads})")
    assert SWEEPS.keys() == BEST_ARM.keys() == set(QUESTIONS)


@pytest.mark.parametrize("question", ["io-process", "workers"])
def test_where_pinning_leaves_compute_fewer_cores_the_sentence_says_so(
    question: str, files: tuple[Path, ...]
) -> None:
    pinned = [pair for pair in sweep(question, files, cores=(0, 1, 2, 3)).pairs
              if pair.arm.endswith("pinned")]  # fmt: skip
    assert pinned
    for pair in pinned:
        assert pair.subject.endswith(" (compute threads: 3)")
        assert pair.than.endswith(" (4)")


def test_page_cache_readers_need_a_cap(files: tuple[Path, ...]) -> None:
    capped = {arm.name for arm in sweep("reader", files).arms}
    free = sweep("reader", files, has_caps=False)
    assert {"mmap", "willneed", "populate"} == capped - {arm.name for arm in free.arms}
    assert "without --cap" in free.notes[0]


def test_quant_needs_two_files_and_finds_the_smaller(files: tuple[Path, ...]) -> None:
    large, small = sweep("quant", files).arms
    assert str(files[1]) in large.flags and str(files[0]) in small.flags
    with pytest.raises(ConfigError, match="expected two files"):
        sweep_of(
            BenchCommand(files[:1], question="quant"), Setting(ROOMS, files[:1], 1, (0,), True)
        )


def test_memory_compares_each_size_with_the_one_below(files: tuple[Path, ...]) -> None:
    first, last = sweep("memory", files).pairs
    assert first.rooms == (ROOMS[1], ROOMS[0])
    assert (last.arm, last.reference, last.rooms) == ("prefetch-router", "prefetch-off", None)
