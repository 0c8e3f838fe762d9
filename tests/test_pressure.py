"""The judgement of memory pressure, and what it is judged from."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.memory_room import MemoryRoom
from coordinator.pressure import GROW_SECONDS, QUIET_SECONDS, Pressure

MiB = 1 << 20
FULL, SMALLEST, UNIT = 1500 * MiB, 8 * MiB, 4 * MiB


def pressure(spare: int = 100 * MiB) -> Pressure:
    """low 50, high 75 MiB with the default."""
    return Pressure(FULL, SMALLEST, UNIT, spare)


def test_nothing_happens_while_there_is_room() -> None:
    judge = pressure()
    for second in range(100):
        assert judge.target(100 * MiB, FULL, second) is None
        assert judge.target(51 * MiB, FULL, second) is None


def test_below_the_low_mark_the_pool_gives_what_is_missing_to_the_high_one() -> None:
    assert pressure().target(49 * MiB, FULL, 0) == FULL - 32 * MiB, "the smallest step"
    assert pressure().target(5 * MiB, FULL, 0) == FULL - 70 * MiB


def test_what_others_take_meanwhile_is_given_too() -> None:
    judge = pressure()
    assert judge.target(80 * MiB, FULL, 0.0) is None
    assert judge.target(70 * MiB, FULL, 0.02) is None
    # 30 MiB in 20 ms, so 375 in a quarter of a second
    target = judge.target(40 * MiB, FULL, 0.04)
    assert target is not None
    assert abs(target - (FULL - 35 * MiB - 375 * MiB)) < MiB
    # what the pool itself takes is not taken by others
    judge = pressure()
    assert judge.target(100 * MiB, 1000 * MiB, 0.0) is None
    assert judge.target(40 * MiB, 1060 * MiB, 0.02) == (1060 - 35) * MiB


def test_never_below_the_smallest() -> None:
    assert pressure().target(0, 20 * MiB, 0) == SMALLEST
    assert pressure().target(0, SMALLEST, 0) is None


@pytest.mark.parametrize(
    ("spare", "low", "high"),
    [(100, 50, 75), (-40, 32, 44), (0, 32, 44), (60, 32, 45), (10_000, 128, 192)],
)
def test_marks_lie_within_what_a_run_leaves(spare: int, low: int, high: int) -> None:
    judge = pressure(spare * MiB)
    assert (judge.low_bytes, judge.high_bytes) == (low * MiB, high * MiB)


def test_it_grows_back_in_steps_after_a_quiet_time() -> None:
    judge = pressure()
    pool = judge.target(0, FULL, 10.0)
    assert pool is not None
    pool -= 300 * MiB
    start = 10.0 + QUIET_SECONDS
    assert judge.target(600 * MiB, pool, start - 0.1) is None
    grown = judge.target(600 * MiB, pool, start)
    assert grown == pool + FULL // 32
    assert judge.target(550 * MiB, grown, start + 0.1) is None
    assert judge.target(550 * MiB, grown, start + GROW_SECONDS) == grown + FULL // 32
    # never so far that the room is below the high mark afterwards
    assert judge.target(85 * MiB, grown, start + 2) == grown + 10 * MiB
    assert judge.target(800 * MiB, FULL - MiB, start + 3) == FULL


def test_a_short_rise_of_the_room_is_no_end_of_the_pressure() -> None:
    judge = pressure()
    pool = judge.target(0, FULL, 0.0)
    assert pool is not None
    for second in range(1, 60):
        room = 60 * MiB if second % 4 == 0 else 300 * MiB  # 60 lies between the marks
        assert judge.target(room, pool, second) is None


def test_steps_hold_a_slot_of_every_class() -> None:
    judge = Pressure(FULL, SMALLEST, 500 * MiB, 100 * MiB)
    judge.target(0, FULL, 0.0)
    assert judge.target(2000 * MiB, 700 * MiB, QUIET_SECONDS) == 1200 * MiB


@given(
    spare=st.integers(44, 3000),
    others=st.lists(st.integers(0, 1200), min_size=1, max_size=40),
)
def test_whatever_others_take_the_pool_comes_back(spare: int, others: list[int]) -> None:
    """Never below the smallest, never above the whole, and whole again 30 s after they ended."""
    judge = pressure(spare * MiB)
    pool, second = FULL, 0.0
    for taken in [*others, *[0] * 600]:
        second += 0.05
        room = (spare - taken) * MiB + FULL - pool
        target = judge.target(room, pool, second)
        if target is not None:
            assert SMALLEST <= target <= FULL
            pool = target
    assert pool == FULL


def group(root: Path, limit: int, usage: int, file: int = 0) -> None:
    """A v1 group with a limit, and a system with much more."""
    for name, text in {
        "proc/meminfo": "MemAvailable: 8388608 kB\n",
        "proc/self/cgroup": "4:memory:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{limit}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{usage}\n",
        "sys/fs/cgroup/memory/box/memory.stat": f"total_active_file {file}\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_bound_is_enough_while_there_is_room_else_the_group_is_looked_at(tmp_path: Path) -> None:
    group(tmp_path, 1000 * MiB, 400 * MiB, file=100 * MiB)
    room = MemoryRoom(tmp_path)
    assert room.look(0.0, 50 * MiB) == 700 * MiB
    assert room.is_limited
    assert room.source == "/sys/fs/cgroup/memory/box/memory.limit_in_bytes"
    assert room.look(0.1, 50 * MiB) == 600 * MiB, "the bound: page cache counts as used"
    assert room.look(0.2, 700 * MiB) == 700 * MiB
    group(tmp_path, 1000 * MiB, 960 * MiB, file=300 * MiB)
    assert room.look(0.3, 50 * MiB) == 340 * MiB
    # the group is full, its page cache gives way to what others take
    group(tmp_path, 1000 * MiB, 1000 * MiB, file=30 * MiB)
    assert room.look(0.4, 50 * MiB) == 30 * MiB
    room.close()


def test_a_new_limit_is_seen_within_a_second(tmp_path: Path) -> None:
    group(tmp_path, 1000 * MiB, 400 * MiB)
    room = MemoryRoom(tmp_path)
    assert room.look(0.0, 0) == 600 * MiB
    group(tmp_path, 500 * MiB, 400 * MiB)
    assert room.look(0.9, 0) == 600 * MiB
    assert room.look(1.0, 0) == 100 * MiB
    assert room.look(1.1, 0) == 100 * MiB
    room.close()


def test_without_a_limit_the_system_counts(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 2048 kB\n")
    room = MemoryRoom(tmp_path)
    assert room.look(0.0, 50 * MiB) == 2 * MiB
    assert not room.is_limited
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")
    assert room.look(0.5, 50 * MiB) == 2 * MiB
    assert room.look(1.0, 50 * MiB) == MiB
    room.close()


def test_a_group_that_is_gone_is_survived(tmp_path: Path) -> None:
    group(tmp_path, 1000 * MiB, 400 * MiB)
    room = MemoryRoom(tmp_path)
    assert room.look(0.0, 0) == 600 * MiB
    for name in ("limit_in_bytes", "usage_in_bytes", "stat"):
        (tmp_path / f"sys/fs/cgroup/memory/box/memory.{name}").unlink()
    assert room.look(1.0, 0) == 8192 * MiB
    assert not room.is_limited
    room.close()
