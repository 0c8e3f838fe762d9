"""Where a measured program runs: what a group of processes can be asked, and the plainest one.

`ProcessTree` needs no rights and bounds nothing; `bench.cgroup` makes groups that do.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Limits:
    """None: unlimited. The disk is its number such as ``254:0``; None where it is not known."""

    memory_bytes: int | None = None
    disk_bytes_per_second: int | None = None
    disk: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of a group. None: unknown."""

    peak_bytes: int | None  # most that was charged at once
    limit_hits: int | None
    oom_kills: int | None
    file_cache_bytes: int | None  # pages of files that are charged to it now


class Group(Protocol):
    """Where one program and its children run."""

    bytes_source: str

    def entrances(self) -> list[Path]:
        """Files that a process writes ``0`` to in order to join."""

    def watch(self, pid: int) -> None:
        """The program has started."""

    def process_ids(self) -> list[int]:
        """Who is in it now."""

    def read_bytes(self) -> int:
        """Bytes read from the disk so far."""

    def memory(self) -> MemoryUse:
        """What was used so far."""

    def close(self) -> None:
        """Kill what is left in it and remove it."""


class ProcessTree:
    """No control group: the program and its children are found in `/proc`. Bounds nothing.

    What a child read is missed only if it starts and ends between two looks.
    """

    bytes_source = "/proc/<pid>/io"

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._program: int | None = None
        self._bytes: dict[int, int] = {}

    def watch(self, pid: int) -> None:
        """See `Group`."""
        self._program, self._bytes = pid, {}

    def entrances(self) -> list[Path]:
        """See `Group`."""
        return []

    def process_ids(self) -> list[int]:
        """See `Group`."""
        found, left = [], [self._program] if self._program is not None else []
        while left:
            pid = left.pop()
            if not (self._proc / str(pid)).exists():
                continue
            found.append(pid)
            for children in (self._proc / str(pid) / "task").glob("*/children"):
                left += [int(child) for child in read_text(children).split()]
        return found

    def read_bytes(self) -> int:
        """See `Group`."""
        for pid in self.process_ids():
            counts = number_lines(read_text(self._proc / str(pid) / "io").replace(":", ""))
            self._bytes[pid] = counts.get("read_bytes", self._bytes.get(pid, 0))
        return sum(self._bytes.values())

    def memory(self) -> MemoryUse:
        """See `Group`."""
        return MemoryUse(None, None, None, None)

    def close(self) -> None:
        """See `Group`. Kills nothing: a number from `/proc` may be another process by now."""


def read_text(path: Path) -> str:
    """Empty where it is not there: a kernel without the file, a process that just ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


def bytes_in_service_bytes(text: str, disk: str | None) -> int:
    """Bytes read in version 1's lines such as ``254:0 Read 4096``; `disk` None: of all disks."""
    lines = [line.split() for line in text.splitlines()]
    return sum(
        int(line[2])
        for line in lines
        if len(line) == 3 and line[1] == "Read" and disk in (None, line[0])
    )


def bytes_in_io_stat(text: str, disk: str | None) -> int:
    """Bytes read in version 2's lines such as ``254:0 rbytes=4096 wbytes=0``."""
    total = 0
    for line in text.splitlines():
        device, *fields = line.split()
        if disk in (None, device):
            values = dict(field.partition("=")[::2] for field in fields)
            total += int(values.get("rbytes", 0))
    return total


def file_cache_bytes(memory_stat: str) -> int | None:
    """Page cache of files in `memory.stat`; shared memory, which lies there too, is not counted."""
    stat = number_lines(memory_stat)
    names = ("inactive_file", "active_file")
    return sum(stat[name] for name in names) if stat.keys() >= set(names) else None


def number_lines(text: str) -> dict[str, int]:
    """Lines such as ``oom_kill 0``."""
    lines = [line.split() for line in text.splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
