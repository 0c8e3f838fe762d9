"""The judgement of memory pressure, and what it is judged from."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.pressure import GROW_SECONDS, QUIET_SECONDS, Pressure
from coordinator.processes.memory_room import MemoryRoom

MiB = 1 << 20
FULL, SMALLEST, UNIT = 1500 * MiB, 8 * MiB, 4 * MiB


PRIVATE = 300 * MiB  # of our processes


def pressure(spare: int = 100 * MiB) -> Pressure:
    """low 62.5 (a 24th of the pool), high 78.125 MiB with the default."""
    return Pressure(FULL, SMALLEST, UNIT, spare)


def judged(judge: Pressure, room_mib: float, pool: int, seconds: float) -> int | None:
    """A look; the pool is what changes of ours."""
    return judge.target(int(room_mib * MiB), pool, pool + PRIVATE, seconds)


def test_nothing_happens_while_there_is_room() -> None:
    judge = pressure()
    for second in range(100):
        assert judged(judge, 100, FULL, second) is None
        assert judged(judge, 93, FULL, second + 0.5) is None


def test_below_the_low_mark_the_pool_gives_what_is_missing_to_the_high_one() -> None:
    assert judged(pressure(), 60, FULL, 0) == FULL - 32 * MiB, "the smallest step"
    assert judged(pressure(), 5, FULL, 0) == FULL - int(73.125 * MiB)


def test_what_others_take_is_taken_to_go_on() -> None:
    judge = pressure()
    assert judged(judge, 200, FULL, 0.0) is None
    assert judged(judge, 193, FULL, 0.1) is None, "so much comes and goes"
    # 20 MiB in 0.1 s, so 50 in a quarter of a second: 173 - 50 is enough still
    assert judged(judge, 173, FULL, 0.2) is None
    # 60 MiB in 0.1 s: 113 - 150 is not
    target = judged(judge, 113, FULL, 0.3)
    assert target is not None
    assert abs(target - (FULL - int((78.125 - 113 + 150) * MiB))) < MiB


def test_what_we_take_ourselves_is_not_taken_by_others() -> None:
    judge = pressure()
    assert judged(judge, 200, FULL - 100 * MiB, 0.0) is None
    assert judged(judge, 100, FULL, 0.1) is None, "the pool grew"
    judge = pressure()
    assert judge.target(200 * MiB, FULL, FULL + PRIVATE, 0.0) is None
    assert judge.target(80 * MiB, FULL, FULL + PRIVATE + 120 * MiB, 0.1) is None, "a prompt"


def test_never_below_the_smallest() -> None:
    assert judged(pressure(), 0, 20 * MiB, 0) == SMALLEST
    assert judged(pressure(), 0, SMALLEST, 0) is None


@pytest.mark.parametrize(
    ("spare", "low", "high"),
    [
        (100, 62.5, 78.125),
        (45, 33.75, 40.5),
        (160, 80, 120),
        (10_000, 128, 192),
        (0, 8, 12),
        (-40, 8, 12),
    ],
)
def test_marks_lie_within_what_a_run_leaves(spare: int, low: float, high: float) -> None:
    judge = pressure(spare * MiB)
    assert (judge.low_bytes, judge.high_bytes) == (low * MiB, high * MiB)


def test_a_small_pool_gives_less_for_safety() -> None:
    assert Pressure(240 * MiB, SMALLEST, UNIT, 40 * MiB).low_bytes == 20 * MiB
    assert Pressure(240 * MiB, SMALLEST, UNIT, 15 * MiB).low_bytes == 10 * MiB


def test_it_grows_back_in_steps_after_a_quiet_time() -> None:
    judge = pressure()
    pool = FULL - 400 * MiB
    judged(judge, 0, FULL, 10.0)
    start = 10.0 + QUIET_SECONDS
    assert judged(judge, 600, pool, start - 0.1) is None
    grown = judged(judge, 600, pool, start)
    assert grown == pool + FULL // 32
    assert judged(judge, 550, grown, start + 0.1) is None
    assert judged(judge, 550, grown, start + GROW_SECONDS) == grown + FULL // 32
    # never so far that the room is below the high mark afterwards
    assert judged(judge, 88.125, grown, start + 20) == grown + 10 * MiB
    assert judged(judge, 800, FULL - MiB, start + 30) == FULL


def test_a_short_rise_of_the_room_is_no_end_of_the_pressure() -> None:
    judge = pressure()
    pool = judged(judge, 0, FULL, 0.0)
    assert pool is not None
    for second in range(1, 60):
        room = 77 if second % 4 == 0 else 120  # 77 lies between the marks
        assert judged(judge, room, pool, second) is None


def test_steps_hold_a_slot_of_every_class() -> None:
    judge = Pressure(FULL, SMALLEST, 500 * MiB, 100 * MiB)
    judged(judge, 0, FULL, 0.0)
    assert judged(judge, 2000, 700 * MiB, QUIET_SECONDS) == 1200 * MiB


SLOT = 5 * MiB  # a whole pool has 300


def changes_of_pool(spare: int, others: Iterable[int]) -> list[int]:
    """Sizes of a pool in slots, each time that it changes; what others hold, in MiB, at each look,
    20 in a second."""
    judge = pressure(spare * MiB)
    pool, sizes = FULL, [FULL // SLOT]
    for number, taken in enumerate(others):
        room = spare - taken + (FULL - pool) / MiB
        target = judged(judge, room, pool, number / 20)
        pool = pool if target is None else target // SLOT * SLOT
        if pool // SLOT != sizes[-1]:
            sizes.append(pool // SLOT)
    return sizes


@pytest.mark.parametrize("drift", [0, 4, 8])
def test_a_little_that_others_keep_does_not_keep_the_pool_short(drift: int) -> None:
    sizes = changes_of_pool(64, [*[drift] * 100, *[400] * 200, *[drift] * 1200])
    assert min(sizes) < 250
    assert sizes[-1] == 300
    assert sizes[sizes.index(min(sizes)) :] == sorted(sizes[sizes.index(min(sizes)) :])


def test_what_was_too_early_is_tried_less_and_less_often() -> None:
    """Others take what the last step left, every minute for an hour."""
    minute = [*[8] * 1100, *range(8, 20), *[20] * 88]
    sizes = changes_of_pool(64, [*[400] * 200, *minute * 60])
    assert sizes.count(300) <= 5
    assert sizes[-1] >= 290


@given(
    spare=st.integers(14, 3000),
    others=st.lists(st.integers(0, 1200), min_size=1, max_size=40),
)
def test_whatever_others_take_the_pool_comes_back(spare: int, others: list[int]) -> None:
    """Never below the smallest, never above the whole, and whole again 30 s after they ended."""
    judge = pressure(spare * MiB)
    pool, second = FULL, 0.0
    for taken in [*others, *[0] * 600]:
        second += 0.05
        target = judged(judge, spare - taken + (FULL - pool) / MiB, pool, second)
        if target is not None:
            assert SMALLEST <= target <= FULL
            pool = target
    assert pool == FULL


def group(
    root: Path, limit: int, usage: int, active: int = 0, inactive: int = 0, name: str = "box/"
) -> None:
    """A v1 group with a limit, and a system with much more."""
    folder = f"sys/fs/cgroup/memory/{name}memory"
    for path, text in {
        "proc/meminfo": "MemAvailable: 8388608 kB\n",
        "proc/self/cgroup": "4:memory:/box\n",
        f"{folder}.limit_in_bytes": f"{limit}\n",
        f"{folder}.usage_in_bytes": f"{usage}\n",
        f"{folder}.stat": f"total_active_file {active}\ntotal_inactive_file {inactive}\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_page_cache_in_use_is_no_room(tmp_path: Path) -> None:
    group(tmp_path, 1000 * MiB, 400 * MiB, active=100 * MiB, inactive=50 * MiB)
    room = MemoryRoom(tmp_path)
    assert room.look(0.0) == 650 * MiB
    assert room.is_limited
    assert room.source == "/sys/fs/cgroup/memory/box/memory.limit_in_bytes"
    group(tmp_path, 1000 * MiB, 990 * MiB, active=50 * MiB)
    assert room.look(0.01) == 10 * MiB
    group(tmp_path, 900 * MiB, 990 * MiB)
    assert room.look(0.02) == -90 * MiB


def test_a_tighter_group_is_seen_within_a_second(tmp_path: Path) -> None:
    group(tmp_path, 1000 * MiB, 400 * MiB)
    room = MemoryRoom(tmp_path)
    assert room.look(0.0) == 600 * MiB
    group(tmp_path, 500 * MiB, 400 * MiB, name="")
    assert room.look(0.9) == 600 * MiB
    assert room.look(1.0) == 100 * MiB


def test_without_a_limit_the_system_counts(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 2048 kB\n")
    room = MemoryRoom(tmp_path)
    assert room.look(0.0) == 2 * MiB
    assert not room.is_limited
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")
    assert room.look(0.5) == 2 * MiB
    assert room.look(1.0) == MiB


def test_a_group_that_is_gone_is_survived(tmp_path: Path) -> None:
    group(tmp_path, 1000 * MiB, 400 * MiB)
    room = MemoryRoom(tmp_path)
    assert room.look(0.0) == 600 * MiB
    for name in ("limit_in_bytes", "usage_in_bytes", "stat"):
        (tmp_path / f"sys/fs/cgroup/memory/box/memory.{name}").unlink()
    assert room.look(1.0) == 8192 * MiB
    assert not room.is_limited
