"""Memory and I/O of our processes as the kernel counts them.

Accounted memory is what a budget must hold: anonymous memory and page tables of every process, and
the allocated bytes of the pool once. Page cache is the system's, not ours.
"""

import os
import re
from pathlib import Path
from typing import Literal

PRIVATE_FIELDS = re.compile(rb"^(?:RssAnon|VmPTE):\s+(\d+) kB$", re.MULTILINE)


def private_bytes(pid: int | Literal["self"], proc: Path = Path("/proc")) -> int:
    """RssAnon + VmPTE of a process; 0 when it is gone. Fields of proc(5) status are in KiB."""
    try:
        status = (proc / str(pid) / "status").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(found) * 1024 for found in PRIVATE_FIELDS.findall(status))


def io_progress(pid: int) -> tuple[int, ...]:
    """Counters of /proc/<pid>/io that move when slabs are read; empty when it is gone.

    Bytes count in units of 64 KiB: sockets and eventfds move `rchar` by a few bytes too.
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ()
    fields = dict(line.split(":", 1) for line in lines)
    return tuple(int(fields[name]) >> 16 for name in ("rchar", "read_bytes"))


def cpu_seconds(pid: int) -> int:
    """Whole seconds of processor time that all threads of a process used; 0 when it is gone.

    Fields 14 and 15 of proc(5) stat, counted behind the name.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    user, system = stat[stat.rindex(b")") + 2 :].split()[11:13]
    return (int(user) + int(system)) // os.sysconf("SC_CLK_TCK")
