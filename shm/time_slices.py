"""How long a thread may run before another has its turn: short slices for those who answer.

Compute keeps all cores busy while the coordinator and the readers, which work for microseconds
only, decide and order what it waits for next. Linux (EEVDF, from 6.12 on) lets a thread that wakes
up with a shorter slice run before one with a longer slice has used its own up, so a read is ordered
soon and not after milliseconds. It costs nobody a share of the processor, and needs no privilege.
Where the system does not know of it, nothing changes.
"""

import ctypes
import os
import platform
import struct

SHORT_NANOSECONDS = 100_000  # the shortest that Linux takes
DEFAULT_NANOSECONDS = 0  # the system's own
_NUMBERS = {"x86_64": 314, "aarch64": 274}  # of sched_setattr(2), which the C library may not have
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
_SCHED_OTHER = 0


def set_slice(nanoseconds: int) -> bool:
    """Of the calling thread, and of those that it starts then; whether the system took it."""
    number = _NUMBERS.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != _SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    fields = (_ATTRIBUTES.size, _SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.pack(*fields), _ATTRIBUTES.size)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
