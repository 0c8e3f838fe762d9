"""Keeps memory out of swap: `mlock` of the dense weights and of the pool.

Locked pages count against the cgroup like others. The pool is shared: it is enough that one process
locks its mapping, and compute is the one that every run has. The lock is on the mapping, and takes
no memory: what lies there is locked when compute first touches it. So where the coordinator punches
a hole, the memory goes back to the system all the same, and a hole that is there already stays one.
(The kernel's `VmLck` counts holes too.)
"""

import ctypes
import errno
import resource
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


def lock_as_wanted(wanted: str, filled: Bytes, pool: Bytes | None = None) -> LockOutcome:
    """Lock memories as ``--mlock`` says; raises `LockRefused`."""
    if wanted == "off":
        return LockOutcome(0, filled.nbytes + (0 if pool is None else pool.nbytes), "")
    outcome = lock(filled, pool)
    if outcome.refusal and wanted == "require":
        raise LockRefused(outcome.refusal)
    return outcome


def lock(filled: Bytes, pool: Bytes | None = None) -> LockOutcome:
    """Lock each as a whole, the pool, which is less urgent, as far as it is touched."""
    needed = filled.nbytes + (0 if pool is None else pool.nbytes)
    number = _lock(_address(filled), filled.nbytes)
    if number:
        return LockOutcome(0, needed, _refusal(number, needed, 0))
    number = 0 if pool is None else _lock_when_filled(_address(pool), pool.nbytes)
    if number:
        return LockOutcome(filled.nbytes, needed, _refusal(number, needed, filled.nbytes))
    return LockOutcome(needed, needed, "")


def lock_when_filled(address: int, n_bytes: int) -> bool:
    """Lock what is touched of a memory when it is touched; whether that is granted."""
    return _lock_when_filled(address, n_bytes) == 0


def _lock(address: int, n_bytes: int) -> int:
    """0 or an errno; takes memory for what is not there yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = ctypes.c_void_p(address), ctypes.c_size_t(n_bytes)
    if n_bytes == 0 or libc.mlock(*pages) == 0:
        return 0
    number = ctypes.get_errno()
    libc.munlock(*pages)  # a part may be
    return number


def _lock_when_filled(address: int, n_bytes: int) -> int:
    """0 or an errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mlock2"):  # a C library without it
        return errno.ENOSYS
    pages = ctypes.c_void_p(address), ctypes.c_size_t(n_bytes)
    if libc.mlock2(*pages, ctypes.c_uint(MLOCK_ONFAULT)) == 0:
        return 0
    return ctypes.get_errno()


def _address(memory: Bytes) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address


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
