"""How much memory this process may still take: the smallest cgroup limit, or what the system has.

`/proc/meminfo` and psutil show the host also inside a container, so the cgroups are walked from
this process's own upward, v1 and v2, and the smallest room counts. Over a cgroup limit an
allocation does not fail: the process is killed. Page cache in the group is counted as free, since
the kernel takes it back. Nothing here decides what the memory is for (see `budget`).
"""

from dataclasses import dataclass
from pathlib import Path

MIN_RESERVE_BYTES = 256 * 1024 * 1024
RESERVE_SHARE = 0.08  # for the rest of the system: page cache of programs, other processes' growth
CGROUP_FOLDER = "sys/fs/cgroup"
NO_LIMIT_BYTES = 2**60  # v1 says "unlimited" as the largest page-aligned number
FILE_CACHE = ("inactive_file", "active_file")  # figures of memory.stat


@dataclass(frozen=True, slots=True)
class LimitedGroup:
    """A cgroup with a limit, by the files that say so."""

    limit_file: Path
    usage_file: Path

    def limit_bytes(self) -> int | None:
        """None where there is no limit. Raises `OSError`, `ValueError` for one that is gone."""
        text = self.limit_file.read_text().strip()
        limit = NO_LIMIT_BYTES if text == "max" else int(text)
        return limit if limit < NO_LIMIT_BYTES else None

    def room_bytes(self, free: tuple[str, ...] = FILE_CACHE) -> int | None:
        """Limit less usage, where page cache of the kinds in `free` counts as free; less than 0
        where the rest is in use. Raises like `limit_bytes`."""
        limit = self.limit_bytes()
        if limit is None:
            return None
        usage = int(self.usage_file.read_text())
        return limit - usage + _stat_bytes(self.limit_file.parent / "memory.stat", free)


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Bytes that may be taken now, and the file that says so."""

    n_bytes: int
    source: str
    group: "LimitedGroup | None" = None  # the one whose limit counts; None: the system's memory

    @property
    def reserve_bytes(self) -> int:
        """What a budget that nobody asked for leaves alone."""
        return max(MIN_RESERVE_BYTES, int(self.n_bytes * RESERVE_SHARE))


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """The smallest room of all cgroups above this process and of the system.

    `root` is where `proc` and `sys` lie; tests give a tree of their own.
    """
    rooms = _cgroup_rooms(root)
    system = _meminfo_bytes(root / "proc/meminfo", "MemAvailable")
    if system is not None:
        rooms.append(AvailableMemory(system, "MemAvailable in /proc/meminfo"))
    if not rooms:  # no /proc: nothing is known, so nothing is promised
        return AvailableMemory(0, "no /proc/meminfo")
    return min(rooms, key=lambda room: room.n_bytes)


def _cgroup_rooms(root: Path) -> list[AvailableMemory]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms: list[AvailableMemory] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # inside a container the path may be that of the host: what is missing is skipped, and the
        # mount's root, which then is the container's own group, is reached in any case
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            if not controllers:
                for mount in (CGROUP_FOLDER, f"{CGROUP_FOLDER}/unified"):
                    group = root.joinpath(mount, *parts[:depth])
                    for limit in ("memory.max", "memory.high"):
                        rooms += _room(root, LimitedGroup(group / limit, group / "memory.current"))
            elif "memory" in controllers.split(","):
                group = root.joinpath(CGROUP_FOLDER, "memory", *parts[:depth])
                files = group / "memory.limit_in_bytes", group / "memory.usage_in_bytes"
                rooms += _room(root, LimitedGroup(*files))
    return rooms


def _room(root: Path, group: LimitedGroup) -> list[AvailableMemory]:
    try:
        n_bytes = group.room_bytes()
    except (OSError, ValueError):
        return []
    if n_bytes is None:
        return []
    source = f"/{group.limit_file.relative_to(root)}"
    return [AvailableMemory(max(0, n_bytes), source, group)]


def _stat_bytes(stat_file: Path, names: tuple[str, ...]) -> int:
    """Sum of some figures of a group and all below it. v1 calls the sums `total_…`."""
    try:
        pairs = [line.split() for line in stat_file.read_text().splitlines()]
        stat = {key: int(value) for key, value in pairs}
    except (OSError, ValueError):
        return 0
    return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in names)


def _meminfo_bytes(meminfo: Path, name: str) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None
