"""What our processes fetched from the disk and how often they faulted, as the kernel counts them.

Where the page cache is the only cache nobody else knows: a fault is a read that no message tells
of. Counted from the moment a process is ready; what one did between the last look at it and its
death is lost.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes fetched from the disk for a process, and its page faults with and without a read."""

    bytes_read: int = 0
    major_faults: int = 0
    minor_faults: int = 0

    def plus(self, other: "DiskUse") -> "DiskUse":
        """The sum of both."""
        return DiskUse(
            self.bytes_read + other.bytes_read,
            self.major_faults + other.major_faults,
            self.minor_faults + other.minor_faults,
        )

    def minus(self, other: "DiskUse") -> "DiskUse":
        """What came since the other."""
        return DiskUse(
            self.bytes_read - other.bytes_read,
            self.major_faults - other.major_faults,
            self.minor_faults - other.minor_faults,
        )


def disk_use(pid: int) -> DiskUse | None:
    """Of a process since its start, from proc(5) io and stat; None if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        # the second field is a name in parentheses and may hold anything
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return DiskUse(int(fields["read_bytes"]), int(stat[9]), int(stat[7]))


class DiskUseTotals:
    """Of all processes, over all their lives. Processes are told apart by their pid."""

    def __init__(self) -> None:
        self._at_ready: dict[int, DiskUse] = {}
        self._last: dict[int, DiskUse] = {}

    def begin(self, pid: int) -> None:
        """The process is ready: what it did to get there does not count."""
        self._at_ready[pid] = self._last[pid] = disk_use(pid) or DiskUse()

    def look(self) -> DiskUse:
        """The total up to now."""
        total = DiskUse()
        for pid, at_ready in self._at_ready.items():
            self._last[pid] = disk_use(pid) or self._last[pid]
            total = total.plus(self._last[pid].minus(at_ready))
        return total
