"""How much memory arms get: pools, caps, and what does not fit."""

from pathlib import Path

import pytest

from coordinator.bench.rooms import left_out, rooms_of
from coordinator.command.bench_commands import CAPS, POOLS, BenchCommand
from coordinator.command.flag_values import ConfigError

GiB, MiB = 1 << 30, 1 << 20
EXPERTS = 4 * GiB


def asked(question: str | None = "memory", pools: str = "", caps: str = "") -> BenchCommand:
    return BenchCommand(
        (Path("m"),), question=question, pools=POOLS.parse(pools) if pools else (),
        caps=CAPS.parse(caps) if caps else (),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bench", "flags", "caps"),
    [
        (asked(), [("--pool", "20%"), ("--pool", "60%")], [None, None]),
        (asked(pools="500M"), [("--pool", str(500 * MiB))], [None]),
        (asked(caps="1G"), [("--memory", str(GiB - GiB // 20))], [GiB]),
        (asked(caps="400M"), [("--memory", str(352 * MiB))], [400 * MiB]),
        (asked(caps="2G", pools="10%"),
         [("--memory", str(2 * GiB - 2 * GiB // 20), "--pool", "10%")], [2 * GiB]),
        (asked(None, caps="1G,2G"), [(), ()], [GiB, 2 * GiB]),
        (asked(None), [()], [None]),
        (asked("quant", pools="25%"), [("--pool", str(GiB))], [None]),
    ],
)  # fmt: skip
def test_rooms(bench: BenchCommand, flags: list[tuple[str, ...]], caps: list[int | None]) -> None:
    rooms = rooms_of(bench, EXPERTS, 8 * GiB)
    assert [room.flags for room in rooms] == flags
    assert [room.cap_bytes for room in rooms] == caps
    assert len({room.name for room in rooms}) == len(rooms)


def test_a_pool_that_does_not_fit_is_left_out_and_said() -> None:
    rooms = rooms_of(asked(), EXPERTS, GiB)
    assert [room.flags for room in rooms] == [("--pool", "20%")]
    assert list(left_out(asked(), rooms, EXPERTS)) == [
        "a pool of 60% does not fit into free memory: left out"
    ]
    with pytest.raises(ConfigError, match=r"at most 100 MiB .*give a smaller --pool"):
        rooms_of(asked(), EXPERTS, 100 * MiB)


def test_a_pool_without_a_question_belongs_into_the_arm() -> None:
    with pytest.raises(ConfigError, match="--arm 'small: --pool 20%'"):
        rooms_of(asked(None, pools="20%"), EXPERTS, 8 * GiB)
