"""Notices: a slab lies in its slot, told to compute by whoever read it, through a pipe.

A message from the reader to the coordinator and one from there to compute take two processes out of
their sleep, on caches that the kernels have just swept: longer than everything else that happens
between a read and the kernel that waits for it. So the thread that read the last byte writes a
notice of 32 bytes, and compute, which was told with its `Grant` what is on its way, begins.

    slot u64 | generation u64 | start ns u64 | stop ns u64          little-endian

One pipe serves all readers and all lives of the processes: the coordinator holds both ends. A write
of up to PIPE_BUF bytes is atomic (pipe(7)), so a reader that is killed leaves a whole notice or
none. A notice is never the only word: `SlabsReady` follows it and says whether it was given, and a
full pipe means that it was not. Whoever reads one compares the generation, since it may be old.
"""

import os
import struct

from shm.messages import ReadSpan, SlabNotice, SlotLease

_NOTICE = struct.Struct("<QQQQ")
_MAX_BYTES = _NOTICE.size * 2048  # what the pipe holds


def notice_pipe() -> tuple[int, int]:
    """Descriptors to read and to write; neither end ever waits. Raises `OSError`."""
    return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)


def give_notice(fd: int, lease: SlotLease, span: ReadSpan) -> bool:
    """Whether compute was told; safe in any thread."""
    notice = _NOTICE.pack(lease.slot, lease.generation, span.start_ns, span.stop_ns)
    try:
        return os.write(fd, notice) == len(notice)
    except BlockingIOError:  # compute has not looked for thousands of slabs: it hears of a grant
        return False


def take_notices(fd: int) -> list[SlabNotice]:
    """What was told since the last call, in order."""
    try:
        data = os.read(fd, _MAX_BYTES)
    except BlockingIOError:
        return []
    return [
        SlabNotice(SlotLease(slot, generation), ReadSpan(start_ns, stop_ns))
        for slot, generation, start_ns, stop_ns in _NOTICE.iter_unpack(data)
    ]
