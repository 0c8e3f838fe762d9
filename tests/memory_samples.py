"""Accounted memory of a run, sampled from outside: ``python tests/memory_samples.py -- COMMAND``.

Samples every `INTERVAL_SECONDS` what a memory budget must hold (RssAnon + VmPTE of all Python
processes below this one, and the allocated bytes of the pool once) and the limit hits of their
memory cgroup. Prints the peaks, and what each process had at the peak. A command that limits the
memory comes in between, so that the sampler itself is outside of the limit::

    python tests/memory_samples.py -- capped -m 1200 -- moe-coord --memory 1100M …
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shm.birth import decode_arguments
from shm.codec import MessageError

INTERVAL_SECONDS = 0.1
POOL_LINK = "/memfd:moe-coord-pool"
MiB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes at one moment. `limit_hits` counts since the group was made; None without a group."""

    seconds: float
    accounted_bytes: int
    pool_bytes: int
    parts: dict[str, int]  # process name -> RssAnon + VmPTE
    group_bytes: int | None
    limit_hits: int | None


@dataclass(slots=True)
class Samples:
    """All samples of a run."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def peak(self) -> Sample:
        """The sample with the most accounted memory."""
        return max(self.samples, key=lambda sample: sample.accounted_bytes)

    def hits_after(self, seconds: float) -> int:
        """Limit hits between the last sample before a moment and the end."""
        hits = [(s.seconds, s.limit_hits) for s in self.samples if s.limit_hits is not None]
        before = [n for at, n in hits if at <= seconds]
        return hits[-1][1] - (before[-1] if before else 0) if hits else 0

    def part_peaks(self) -> dict[str, int]:
        """The most that each process had, and the pool."""
        peaks: dict[str, int] = {}
        for sample in self.samples:
            for name, n_bytes in {**sample.parts, "pool": sample.pool_bytes}.items():
                peaks[name] = max(peaks.get(name, 0), n_bytes)
        return peaks


def take_sample(root: int, started: float) -> Sample:
    """Look at `root` and all processes below it now, those that are Python."""
    parts: dict[str, int] = {}
    pool: dict[int, int] = {}  # by inode
    group = None
    for pid in family(root):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"python" not in Path(arguments[0].decode()).name.encode():
                continue
            parts[process_name(arguments)] = private_bytes(pid)
            pool.update(pool_files(pid))
            group = memory_group(pid) or group  # of the last: who limits the memory is outside
        except (OSError, ProcessLookupError):
            continue  # it ended while it was looked at
    pool_bytes = sum(pool.values())
    usage, hits = group_figures(group) if group else (None, None)
    total = sum(parts.values()) + pool_bytes
    return Sample(time.monotonic() - started, total, pool_bytes, parts, usage, hits)


def family(root: int) -> Iterator[int]:
    """A process and all below it."""
    yield root
    try:
        tasks = list(Path(f"/proc/{root}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield from family(child)


def process_name(arguments: Sequence[bytes]) -> str:
    """`compute`, `io0` and so on as their start arguments say, else `coordinator`."""
    for argument in arguments[1:]:
        try:
            return decode_arguments(argument.decode()).process
        except (ValueError, MessageError):
            continue
    return "coordinator"


def private_bytes(pid: int) -> int:
    """RssAnon + VmPTE."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return sum(
        int(status[name].split()[0]) * 1024 for name in ("RssAnon", "VmPTE") if name in status
    )


def pool_files(pid: int) -> dict[int, int]:
    """Allocated bytes of the pools that a process holds open, by inode."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if str(link.readlink()).startswith(POOL_LINK):
            status = link.stat()
            found[status.st_ino] = status.st_blocks * 512
    return found


def memory_group(pid: int) -> Path | None:
    """The memory cgroup of a process, v1 or v2."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path(f"/sys/fs/cgroup/memory{path}")
    return None


def group_figures(group: Path) -> tuple[int | None, int | None]:
    """Usage and limit hits of a v1 group."""
    try:
        return (
            int((group / "memory.usage_in_bytes").read_text()),
            int((group / "memory.failcnt").read_text()),
        )
    except (OSError, ValueError):
        return None, None


def sampled(
    process: "subprocess.Popen[Any]", started: float, interval_seconds: float = INTERVAL_SECONDS
) -> Samples:
    """Sample until the process ends."""
    samples = Samples()
    while process.poll() is None:
        begin = time.monotonic()
        samples.samples.append(take_sample(process.pid, started))
        time.sleep(max(0.0, interval_seconds - (time.monotonic() - begin)))
    return samples


def main() -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="a line per sample too")
    parser.add_argument("--interval", type=float, default=INTERVAL_SECONDS, metavar="SECONDS")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    started = time.monotonic()
    process = subprocess.Popen(options.command)
    samples = sampled(process, started, options.interval)
    if options.all:
        for sample in samples.samples:
            print(
                f"{sample.seconds:6.1f} s accounted {sample.accounted_bytes / MiB:8.1f} pool "
                f"{sample.pool_bytes / MiB:8.1f} group {(sample.group_bytes or 0) / MiB:8.1f} MiB, "
                f"limit hits {sample.limit_hits}",
                {name: round(n / MiB, 1) for name, n in sample.parts.items()},
                file=sys.stderr,
            )
    peaks = {name: round(n / MiB, 1) for name, n in samples.part_peaks().items()}
    peak = samples.peak
    parts = {name: round(n / MiB, 1) for name, n in peak.parts.items()}
    print(
        f"samples: {len(samples.samples)}; accounted peak {peak.accounted_bytes / MiB:.1f} MiB at "
        f"{peak.seconds:.1f} s: pool {peak.pool_bytes / MiB:.1f}, {json.dumps(parts)}; "
        f"each at its most: {json.dumps(peaks)}",
        file=sys.stderr,
    )
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
