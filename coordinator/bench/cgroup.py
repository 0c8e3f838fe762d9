"""A fresh control group for one program: caps its memory and its disk, and counts what it read.

Version 1 (a folder in each of two trees) and version 2 (one folder) look alike from outside.
The memory cap covers page cache too, as the memory of a small machine does, and allows no swap:
what a program would have kept in memory must not be counted as a disk that is fast.

Rule to keep: whoever opens a group closes it, also after a signal; a group outlives its processes.
Who is killed cannot: its groups have names that no other run takes, and a later run removes them.
"""

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from coordinator.processes.group import (
    Group,
    Limits,
    MemoryUse,
    ProcessTree,
    bytes_in_io_stat,
    bytes_in_service_bytes,
    file_cache_bytes,
    number_lines,
    read_text,
)
from coordinator.processes.limits import ResourceError

CGROUP_FOLDER = "sys/fs/cgroup"
# Version 1 counts bytes only on disks that some group limits (Linux 6.10 on): no disk is that fast.
NO_LIMIT_BYTES_PER_SECOND = 10**15
REMOVE_SECONDS = 5.0
REMOVE_POLL_SECONDS = 0.02
_NAME = re.compile(r"moe-coord-[a-z-]+-(\d+)-(\d+)")  # process and moment that made it
# A process that is not seen may live in a namespace of its own and be about to join: give it time.
LEFTOVER_NANOSECONDS = 60 * 10**9


class GroupV1:
    """One folder under `memory` and one under `blkio`."""

    bytes_source = "blkio.throttle.io_service_bytes"

    def __init__(self, name: str, limits: Limits, root: Path) -> None:
        self._memory = root / CGROUP_FOLDER / "memory" / name
        self._disk = root / CGROUP_FOLDER / "blkio" / name
        self._device = limits.disk
        self._made: list[Path] = []
        try:
            for folder in (self._memory, self._disk):
                folder.mkdir()
                self._made.append(folder)
            self._limit(limits)
        except BaseException:
            self.close()
            raise

    def _limit(self, limits: Limits) -> None:
        if limits.memory_bytes is not None:
            _write(self._memory / "memory.limit_in_bytes", str(limits.memory_bytes))
            # not a limit of memory and swap together: with one, `memory.failcnt` counts nothing
            _write(self._memory / "memory.swappiness", "0")
        if limits.disk is not None:
            rate = limits.disk_bytes_per_second or NO_LIMIT_BYTES_PER_SECOND
            _write(self._disk / "blkio.throttle.read_bps_device", f"{limits.disk} {rate}")

    def entrances(self) -> list[Path]:
        """See `Group`."""
        return [folder / "cgroup.procs" for folder in self._made]

    def watch(self, pid: int) -> None:
        """See `Group`. It joined by itself."""

    def process_ids(self) -> list[int]:
        """See `Group`."""
        return _process_ids(self.entrances())

    def read_bytes(self) -> int:
        """See `Group`."""
        text = read_text(self._disk / "blkio.throttle.io_service_bytes")
        return bytes_in_service_bytes(text, self._device)

    def memory(self) -> MemoryUse:
        """See `Group`."""
        kills = number_lines(read_text(self._memory / "memory.oom_control")).get("oom_kill")
        return MemoryUse(
            _number(read_text(self._memory / "memory.max_usage_in_bytes")),
            _number(read_text(self._memory / "memory.failcnt")),
            kills,
            file_cache_bytes(read_text(self._memory / "memory.stat")),
        )

    def close(self) -> None:
        """See `Group`."""
        _kill_all(self)
        for folder in self._made:
            _remove(folder)


class GroupV2:
    """One folder at the top of the unified tree."""

    bytes_source = "io.stat"

    def __init__(self, name: str, limits: Limits, root: Path) -> None:
        top = root / CGROUP_FOLDER
        self._folder = top / name
        self._device = limits.disk
        has = read_text(top / "cgroup.controllers").split()
        for controller in ("memory", "io"):
            if controller in has:
                _write(top / "cgroup.subtree_control", f"+{controller}")
        self._folder.mkdir()
        try:
            if limits.memory_bytes is not None:
                _write(self._folder / "memory.max", str(limits.memory_bytes))
                swap = self._folder / "memory.swap.max"
                if swap.exists():
                    _write(swap, "0")
            if limits.disk is not None and limits.disk_bytes_per_second is not None:
                rate = limits.disk_bytes_per_second
                _write(self._folder / "io.max", f"{limits.disk} rbps={rate}")
        except BaseException:
            self.close()
            raise

    def entrances(self) -> list[Path]:
        """See `Group`."""
        return [self._folder / "cgroup.procs"]

    def watch(self, pid: int) -> None:
        """See `Group`. It joined by itself."""

    def process_ids(self) -> list[int]:
        """See `Group`."""
        return _process_ids(self.entrances())

    def read_bytes(self) -> int:
        """See `Group`."""
        return bytes_in_io_stat(read_text(self._folder / "io.stat"), self._device)

    def memory(self) -> MemoryUse:
        """See `Group`."""
        events = number_lines(read_text(self._folder / "memory.events"))
        peak = _number(read_text(self._folder / "memory.peak"))
        cached = file_cache_bytes(read_text(self._folder / "memory.stat"))
        return MemoryUse(peak, events.get("max"), events.get("oom_kill"), cached)

    def close(self) -> None:
        """See `Group`."""
        _kill_all(self)
        _remove(self._folder)


def group_name(purpose: str) -> str:
    """A name that no other group has or had since the machine started; `purpose` in a-z and -."""
    return f"moe-coord-{purpose}-{os.getpid()}-{time.monotonic_ns()}"


def remove_leftovers(root: Path = Path("/")) -> None:
    """Remove groups that runs which were killed have left, where no process is in them any more."""
    top = root / CGROUP_FOLDER
    latest = time.monotonic_ns() - LEFTOVER_NANOSECONDS
    for folder in (*top.glob("moe-coord-*"), *top.glob("*/moe-coord-*")):
        match = _NAME.fullmatch(folder.name)
        if match is None or int(match[2]) > latest or (root / "proc" / match[1]).exists():
            continue
        with contextlib.suppress(OSError):  # somebody is in it, or it belongs to another user
            folder.rmdir()


def open_group(name: str, limits: Limits, root: Path = Path("/")) -> Group:
    """A group with these limits; `root` is where `proc` and `sys` lie.

    Raises `ResourceError` if limits were asked for and cannot be set.
    """
    top = root / CGROUP_FOLDER
    try:
        if (top / "memory").is_dir() and (top / "blkio").is_dir():
            return GroupV1(name, limits, root)
        return GroupV2(name, limits, root)
    except OSError as error:
        if limits.memory_bytes is None and limits.disk_bytes_per_second is None:
            return ProcessTree(root)
        raise ResourceError(
            f"{error.filename or top}: expected a control group that can be limited, found "
            f"{error.strerror}; run it as root, or leave the limits out"
        ) from error


def _write(path: Path, text: str) -> None:
    """Control files take one write, and must exist."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _process_ids(entrances: Iterable[Path]) -> list[int]:
    return sorted({int(pid) for path in entrances for pid in read_text(path).split()})


def _kill_all(group: Group) -> None:
    deadline = time.monotonic() + REMOVE_SECONDS
    while (left := group.process_ids()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(REMOVE_POLL_SECONDS)


def _remove(folder: Path) -> None:
    """A group is busy for a moment after its last process died."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(REMOVE_POLL_SECONDS)
