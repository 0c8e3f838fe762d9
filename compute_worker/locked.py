"""Keeps memory out of swap: `mlock` of the dense weights and of the pool.

Locked pages count against the cgroup like others. The pool is shared: it is enough that one process
locks its mapping, and compute is the one that every run has. The lock is on the mapping: where the
coordinator punches a hole, the memory goes back to the system all the same, and what fills the hole
later is locked when compute first touches it. (The kernel's `VmLck` goes on counting the hole.)
"""

import ctypes
import errno
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compute_worker.matrix import Bytes

MLOCK_ONFAULT = 1  # linux/mman.h
CAP_IPC_LOCK = 14  # whoever has it may lock more than the limit; linux/capability.h


class LockRefused(Exception):
    """``--mlock require`` and the system does not let us; the text has the figures."""


@dataclass(frozen=True, slots=True)
class LockOutcome:
    """`refusal` is empty where all is locked, or was not to be, else a line with what it needs."""

    locked_bytes: int
    needed_bytes: int
    refusal: str

    @property
    def setting(self) -> str:
        """What became of ``--mlock``: off, part (the dense weights alone), all."""
        if self.locked_bytes == self.needed_bytes:
            return "all"
        return "part" if self.locked_bytes else "off"


def lock_as_wanted(wanted: str, memories: Sequence[Bytes]) -> LockOutcome:
    """Lock memories, the first the most urgent, as ``--mlock`` says; raises `LockRefused`."""
    if wanted == "off":
        return LockOutcome(0, sum(memory.nbytes for memory in memories), "")
    outcome = lock(memories)
    if outcome.refusal and wanted == "require":
        raise LockRefused(outcome.refusal)
    return outcome


def lock(memories: Sequence[Bytes]) -> LockOutcome:
    """Lock each of these as a whole, up to the first that cannot be."""
    libc = ctypes.CDLL(None, use_errno=True)
    needed = sum(memory.nbytes for memory in memories)
    locked = 0
    for memory in memories:
        address = ctypes.c_void_p(memory.__array_interface__["data"][0])
        n_bytes = ctypes.c_size_t(memory.nbytes)
        if memory.nbytes and libc.mlock(address, n_bytes) != 0:
            number = ctypes.get_errno()
            libc.munlock(address, n_bytes)  # a part may be
            return LockOutcome(locked, needed, _refusal(number, needed, locked))
        locked += memory.nbytes
    return LockOutcome(locked, needed, "")


def lock_when_filled(address: int, n_bytes: int) -> bool:
    """Lock what is touched of a memory when it is touched; whether that is granted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mlock2"):  # a C library without it
        return False
    pages = ctypes.c_void_p(address), ctypes.c_size_t(n_bytes)
    return int(libc.mlock2(*pages, ctypes.c_uint(MLOCK_ONFAULT))) == 0


def _refusal(number: int, needed: int, locked: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    # EPERM: the limit is 0. ENOMEM: the limit is too small. EAGAIN: not all pages could be locked.
    name = errno.errorcode.get(number, str(number))
    so_far = f", {locked} are locked (the dense weights)" if locked else ""
    return (
        f"mlock: cannot lock {needed} bytes ({name}){so_far}: the limit is {limit} bytes, "
        f"{max(0, needed - limit)} too few; raise it with `ulimit -l` or LimitMEMLOCK="
    )


def refusal_to_lock(n_bytes: int) -> str:
    """Empty where this process may lock so many bytes, else one line with the figures."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or n_bytes <= limit or _may_lock_anything():
        return ""
    return (
        f"mlock: cannot lock {n_bytes} bytes of weights and experts: the limit is {limit} bytes, "
        f"{n_bytes - limit} too few; raise it with `ulimit -l` or LimitMEMLOCK="
    )


def _may_lock_anything() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> CAP_IPC_LOCK & 1)
