"""`moe-coord capped`: any command under a memory cap and a disk rate, from an empty page cache.

For what no measurement is built in: another program, a service, a test. Says at the end how much
memory the command took, how often it met the limit, and what it read.
"""

import signal
import sys

from coordinator.bench.cache import drop_cache
from coordinator.bench.cgroup import group_name, open_group, remove_leftovers
from coordinator.bench.disk import disk_of, read_ahead
from coordinator.command.bench_commands import CappedCommand
from coordinator.command.signals import stop_signals
from coordinator.processes.group import Group, Limits
from coordinator.processes.limits import ResourceError
from coordinator.processes.program import run_attached

MiB = 1024 * 1024
CANNOT_EXECUTE = 126


def run_capped(command: CappedCommand) -> int:
    """Run it; returns its exit code. Raises `ResourceError` where a limit cannot be set."""
    disk = disk_of(command.disk)
    if command.disk_bytes_per_second is not None and disk is None:
        raise ResourceError(
            f"--disk-rate: expected a disk under {command.disk}, found a file system without one; "
            "name a folder on the disk with --disk"
        )
    limits = Limits(
        command.memory_bytes, command.disk_bytes_per_second, disk.number if disk else None
    )
    with stop_signals(noted=(signal.SIGTERM, signal.SIGHUP)) as stop:
        remove_leftovers()
        group = open_group(group_name("capped"), limits)
        try:
            with read_ahead(disk, command.read_ahead_kib):
                if not command.keep_cache:
                    drop_cache([])
                code = run_attached(command.command, group, stop)
            print(f"capped: {_summary(group, command)}, exit {code}", file=sys.stderr)
        except (FileNotFoundError, PermissionError) as error:
            raise ResourceError(
                f"{command.command[0]!a:.200}: expected a command that can be started, found "
                f"{error.strerror}; check its name"
            ) from error
        finally:
            group.close()
    return code


def _summary(group: Group, command: CappedCommand) -> str:
    memory, read = group.memory(), f"{group.read_bytes() / MiB:.0f} MiB read"
    if memory.peak_bytes is None:
        return read
    limit = f" of {command.memory_bytes / MiB:.0f}" if command.memory_bytes else ""
    peak = f"peak {memory.peak_bytes / MiB:.0f}{limit} MiB"
    kills = f", {memory.oom_kills} killed" if memory.oom_kills else ""
    return f"{peak}, limit hit {memory.limit_hits} times{kills}, {read}"
