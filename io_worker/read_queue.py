"""Reads slabs with a fixed number of threads and tells the owner's poll loop when one is there.

    owner  submit ──> ranges, first in first out ──> threads, one `preadv` each at a time
    owner  collect <── completions, eventfd <── the thread that read the last range of a slab

The ranges of an expert are queued together and may run on several threads. Used by the I/O worker,
by the compute process with threads of its own, and inline: without threads `submit` reads.

Where there is no pool it warms the page cache in the same way, and the leases only tell one slab
from another.

Rules: the slot header is written after the last byte of the slab; a slab is answered only when none
of its ranges is being read any more, also after a failure; a slot that is being read is not read
into a second time. `submit`, `collect` and `close` belong to one thread, the owner.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from queue import Empty, SimpleQueue

from io_worker.page_cache import CacheWarmer
from io_worker.read_check import Window
from io_worker.reader import ReadError
from io_worker.slab_places import PageCache, PoolSlots
from io_worker.slab_reader import SlabReader
from shm.messages import ReadFailed, ReadSpan, SlabRead, SlabsReady, SlotLease
from shm.notices import give_notice
from shm.pool import PoolMapping

Completion = SlabsReady | ReadFailed


class ThreadsError(Exception):
    """The system has no room for another thread; the text is one line."""


class _Slab:
    """One expert on its way. Guarded by the queue's lock once its ranges are queued."""

    __slots__ = (
        "bytes_over_read",
        "bytes_read",
        "failure",
        "is_over",
        "n_left",
        "read",
        "start_ns",
        "windows",
    )

    def __init__(self, read: SlabRead, windows: tuple[Window, ...]) -> None:
        self.read = read
        self.windows = windows
        self.n_left = len(read.ranges)
        self.start_ns = 0  # 0: no thread took a range of it yet
        self.bytes_read = 0
        self.bytes_over_read = 0
        self.failure: ReadFailed | None = None  # of the first range that failed
        self.is_over = False  # nothing of it is being read any more


class ReadQueue:
    """Slab reads in flight: `n_threads` ranges at once; with 0 the caller of `submit` reads.

    `completion_fd` is an eventfd: readable when `collect` has something. With a `notice_fd` the
    thread that read a slab tells compute itself (see `shm.notices`). Raises `ThreadsError`.
    """

    def __init__(
        self,
        n_threads: int,
        reader: SlabReader | CacheWarmer,
        pool: PoolMapping | None,
        notice_fd: int | None = None,
    ) -> None:
        self.n_done = 0  # slabs answered, for heartbeats
        self._notice_fd = notice_fd
        self._reader = reader
        file_sizes_bytes = [source.file.size_bytes for source in reader.sources]
        self._place: PoolSlots | PageCache
        if pool is not None:
            self._place = PoolSlots(pool, file_sizes_bytes)
        else:
            self._place = PageCache(file_sizes_bytes)
        self._in_flight: dict[int, _Slab] = {}  # by slot; touched by the owner only
        self._lock = threading.Lock()
        self._ranges: SimpleQueue[tuple[_Slab, int] | None] = SimpleQueue()
        self._completions: SimpleQueue[Completion | BaseException] = SimpleQueue()
        self.completion_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # daemons: a thread that is stuck in the disk must not keep the process from ending
        self._threads = [
            threading.Thread(target=self._serve, name=f"read{index}", daemon=True)
            for index in range(n_threads)
        ]
        for thread in self._threads:
            _start(thread)

    def submit(self, reads: Iterable[SlabRead]) -> None:
        """Queue slabs, in order. Each is answered once, by `collect`.

        Told again of a read that is on its way (its order was thought lost), the one answer stands.
        """
        for read in reads:
            slot = read.lease.slot
            before = self._in_flight.get(slot)
            if before is not None and before.read.lease == read.lease:
                continue
            try:
                if before is not None and not before.is_over:  # over: just not collected yet
                    raise ReadError(0, f"slot {slot}: still being read for another lease")
                windows = self._place.check(read)
            except ReadError as error:
                self._complete(_failed(read.lease, error))
                continue
            self._in_flight[slot] = slab = _Slab(read, windows)
            for index in range(len(read.ranges)):
                if self._threads:
                    self._ranges.put((slab, index))
                else:
                    self._read_range(slab, index)

    def forget(self, slots: Iterable[int]) -> None:
        """The memory of these slots was given back; none of them is being read."""
        self._place.forget(slots)

    def collect(self) -> list[Completion]:
        """What finished since the last call. Raises what killed a reading thread, if one died."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.completion_fd)
        completions: list[Completion] = []
        while not self._completions.empty():
            completion = self._completions.get()
            if isinstance(completion, BaseException):
                raise completion
            slab = self._in_flight.get(completion.lease.slot)
            if slab is not None and slab.read.lease == completion.lease:
                del self._in_flight[completion.lease.slot]
            completions.append(completion)
        self.n_done += len(completions)
        return completions

    @property
    def n_in_flight(self) -> int:
        """Slabs submitted and not collected."""
        return len(self._in_flight)

    def close(self, timeout_seconds: float = 1.0) -> bool:
        """Drop what is queued, let running reads end; whether all threads ended in time.

        If not, pool and files must stay open: a thread may still write.
        """
        with contextlib.suppress(Empty):
            while not self._ranges.empty():
                self._ranges.get_nowait()
        for _ in self._threads:
            self._ranges.put(None)
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        os.close(self.completion_fd)
        return True

    def _serve(self) -> None:
        """Life of one thread."""
        try:
            while (job := self._ranges.get()) is not None:
                self._read_range(*job)
        except BaseException as error:  # a fault of ours: the owner must hear of it and end
            self._complete(error)

    def _read_range(self, slab: _Slab, index: int) -> None:
        # Two threads may both find 0 here: their times are the same but for the time between these
        # lines, and a lock for each range costs more than it settles.
        if slab.start_ns == 0:
            slab.start_ns = time.monotonic_ns()
        failure = None
        n_read = n_over_read = 0
        if slab.failure is None:
            try:
                self._place.prepare(slab.windows[index])
                outcome = self._reader.read(slab.read.ranges[index])
                n_read, n_over_read = outcome.bytes_read, outcome.bytes_over_read
            except ReadError as error:
                # as a message: a kept exception would keep views of the pool alive
                failure = _failed(slab.read.lease, error, slab.read)
        with self._lock:
            slab.failure = slab.failure or failure
            slab.bytes_read += n_read
            slab.bytes_over_read += n_over_read
            slab.n_left -= 1
            is_last = slab.n_left == 0
        if is_last:
            self._finish(slab)

    def _finish(self, slab: _Slab) -> None:
        read = slab.read
        if slab.failure is not None:
            slab.is_over = True
            self._complete(slab.failure)
            return
        self._place.finish(read, slab.bytes_read)
        slab.is_over = True  # before anybody hears of it: the slot may be read into from then on
        span = ReadSpan(slab.start_ns, time.monotonic_ns())
        noticed = self._notice_fd is not None and give_notice(self._notice_fd, read.lease, span)
        self._complete(
            SlabsReady(
                read.lease,
                span.start_ns,
                span.stop_ns,
                slab.bytes_read,
                slab.bytes_over_read,
                noticed,
            )
        )

    def _complete(self, completion: Completion | BaseException) -> None:
        self._completions.put(completion)
        os.eventfd_write(self.completion_fd, 1)


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:  # what Python makes of EAGAIN and ENOMEM
        raise ThreadsError(
            f"reading threads: cannot start one ({error}); use a smaller --queue-depth or "
            "--io-threads, or raise `ulimit -u` and `ulimit -v`"
        ) from error


def _failed(lease: SlotLease, error: ReadError, read: SlabRead | None = None) -> ReadFailed:
    where = "" if read is None else f"layer {read.layer} expert {read.expert}: "
    return ReadFailed(lease, error.errno, f"{where}{error}", error.model_changed)
