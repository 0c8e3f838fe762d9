"""The disk under a file: which one it is, and its read-ahead while something is measured.

What is changed here is put back by the one who changed it, and by one at a time.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.processes.group import read_text
from coordinator.processes.limits import ResourceError


@dataclass(frozen=True, slots=True)
class Disk:
    """A whole disk, never a partition: limits and queues belong to it. `number` as ``254:0``."""

    name: str
    number: str
    queue: Path

    @property
    def read_ahead_kib(self) -> int | None:
        """How far the kernel reads ahead now."""
        text = read_text(self.queue / "read_ahead_kb").strip()
        return int(text) if text.isdigit() else None

    def describe(self) -> dict[str, str]:
        """What a report should say of it."""
        device = self.queue.parent / "device"
        return {
            "name": self.name,
            "model": read_text(device / "model").strip(),
            "rotational": read_text(self.queue / "rotational").strip(),
            "scheduler": read_text(self.queue / "scheduler").strip(),
        }


def disk_of(path: Path, root: Path = Path("/")) -> Disk | None:
    """The disk that a file or folder lies on; None for a file system without one of its own."""
    device = path.stat().st_dev
    link = root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    if not link.exists():
        return None
    folder = link.resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    number = read_text(folder / "dev").strip()
    return Disk(folder.name, number, folder / "queue")


def file_system(path: Path, root: Path = Path("/")) -> dict[str, str] | None:
    """Type and options of the mount that a file lies on, from mountinfo; None where it is not."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found = None
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) > 5 and kind and fields[2] == number:
            found = {"type": kind[0], "options": fields[5]}  # the last mount of a disk hides others
    return found


@contextlib.contextmanager
def read_ahead(disk: Disk | None, kib: int | None) -> Iterator[None]:
    """Set the read-ahead and put it back; None changes nothing. Raises `ResourceError`."""
    if kib is None:
        yield
        return
    if disk is None:
        raise ResourceError(
            "--read-ahead: expected a file on a disk, found a file system without one; "
            "leave it out, or use a copy on a disk"
        )
    file = disk.queue / "read_ahead_kb"
    try:
        with file.open() as setting:
            # two at once would each put back what the other had set
            fcntl.flock(setting, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before = disk.read_ahead_kib
            file.write_text(f"{kib}\n")
            try:
                yield
            finally:
                file.write_text(f"{before}\n")
    except BlockingIOError as error:
        raise ResourceError(
            f"--read-ahead: expected {file} to be free, found another measurement that holds it; "
            "wait for its end"
        ) from error
    except PermissionError as error:
        raise ResourceError(
            f"--read-ahead: expected to write {file}, found {error.strerror}; run it as root"
        ) from error
