"""The rooms of a comparison: how much memory its arms get, and by which flags.

Arms are compared inside one room, where all of them may use the same memory. Without control
groups a room is a size of the pool; a cap bounds all that a block may use, page cache included.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from coordinator.command.bench_commands import BenchCommand
from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import PoolSize, format_size

POOLS = (PoolSize(share=0.2), PoolSize(share=0.6))
MIN_CAP_REST_BYTES = 48 << 20  # of a cap, for what is charged to the group and is not ours
CAP_REST_SHARE = 0.05
WHOLE_MACHINE = "the whole machine"


@dataclass(frozen=True, slots=True)
class Room:
    """`name` reads on after "with"; `flags` go to our arms."""

    name: str
    flags: tuple[str, ...] = ()
    cap_bytes: int | None = None
    memory_bytes: int | None = None  # what `--memory` is told; None: nothing
    pool_bytes: int | None = None
    short: str = ""  # for a chart


def rooms_of(bench: BenchCommand, all_experts_bytes: int, spare_bytes: int) -> tuple[Room, ...]:
    """Every cap with every pool; `spare_bytes`: what pools may take at most. Two files share pools
    of as many bytes, which are shares of the larger one's experts.

    Raises `ConfigError` if nothing that was asked for fits.
    """
    if not bench.question:
        if bench.pools:
            raise ConfigError(
                "--pool: expected it with --question, found --arm or neither; write it into the "
                "arm, such as --arm 'small: --pool 20%'"
            )
        caps: tuple[int | None, ...] = bench.caps or (None,)
        return tuple(Room(_name(cap, None), (), cap, short=_short(cap, None)) for cap in caps)
    asked = bench.pools or (() if bench.caps else POOLS)
    rooms = []
    for cap in bench.caps or (None,):
        for pool in asked or (None,):
            if bench.question == "quant" and pool is not None and pool.share is not None:
                pool = PoolSize(n_bytes=int(pool.share * all_experts_bytes))
            room = _room(cap, pool, all_experts_bytes)
            if cap is not None or (room.pool_bytes or 0) <= spare_bytes:
                rooms.append(room)
    if not rooms:
        raise ConfigError(
            f"--pool: expected a pool of at most {format_size(spare_bytes)} (what is free here), "
            f"found {', '.join(map(str, asked))} of {format_size(all_experts_bytes)}; give a "
            "smaller --pool"
        )
    return tuple(rooms)


def left_out(bench: BenchCommand, rooms: tuple[Room, ...], all_experts_bytes: int) -> Iterator[str]:
    """Pools that are not tried because they do not fit, as notes."""
    asked = bench.pools or POOLS
    kept = {room.pool_bytes for room in rooms}
    for pool in () if bench.caps or not bench.question else asked:
        if (pool.n_bytes or int((pool.share or 0) * all_experts_bytes)) not in kept:
            yield f"a pool of {pool} does not fit into free memory: left out"


def _room(cap: int | None, pool: PoolSize | None, all_experts_bytes: int) -> Room:
    flags: tuple[str, ...] = ()
    memory = None
    if cap is not None:
        memory = cap - max(MIN_CAP_REST_BYTES, int(cap * CAP_REST_SHARE))
        flags += ("--memory", str(memory))
    n_bytes = None
    if pool is not None:
        n_bytes = pool.n_bytes or int((pool.share or 0) * all_experts_bytes)
        flags += ("--pool", str(pool))
    return Room(_name(cap, pool), flags, cap, memory, n_bytes, _short(cap, pool))


def _name(cap: int | None, pool: PoolSize | None) -> str:
    parts = []
    if pool is not None:
        share = f"{pool} of the experts" if pool.share else format_size(pool.n_bytes or 0)
        parts.append(f"{share} in the pool")
    if cap is not None:
        parts.append(f"{format_size(cap)} of memory")
    return " and ".join(parts) or WHOLE_MACHINE


def _short(cap: int | None, pool: PoolSize | None) -> str:
    parts = []
    if pool is not None:
        parts.append(str(pool) if pool.share else format_size(pool.n_bytes or 0))
    if cap is not None:
        parts.append(format_size(cap))
    return " in ".join(parts)
