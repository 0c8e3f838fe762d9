"""The compute worker: ``python -P -m compute_worker ARGUMENTS``.

Its whole life: be born, connect, `Hello`, `Welcome`, load the dense weights, `Ready`; then execute
steps until `Stop`. With ``--io-workers 0`` it also reads the slabs that are addressed to it.
"""

import json
import os
import select
import sys
import time
from collections import deque
from typing import Any

import zmq

from compute_worker.assemble import Assembled, assemble
from compute_worker.exit_codes import EXIT_CONFIGURATION, EXPECTED, ending
from compute_worker.link import Stopping
from compute_worker.settings import ComputeSettings, decode_settings
from compute_worker.waiting import poll_for
from io_worker.read_queue import ReadQueue
from io_worker.slab_reader import reader_named
from shm.birth import Birth, ChildArguments, begin_life, decode_arguments, parent_is_gone
from shm.codec import MessageError
from shm.garbage import look_seldom
from shm.link import LinkError, has_message, pair_socket, send_now
from shm.messages import (
    PROTOCOL_VERSION,
    Failed,
    Finished,
    Forget,
    Heartbeat,
    Hello,
    LoadBlocks,
    Progress,
    ReadSlabs,
    ReadSpan,
    Ready,
    SaveBlocks,
    SlabNotice,
    SlabsReady,
    SlotsPunched,
    Step,
    Stop,
    Submit,
    decode,
    encode,
    welcomed,
)
from shm.notices import take_notices
from shm.pool import PoolMapping
from shm.time_slices import DEFAULT_NANOSECONDS, SHORT_NANOSECONDS, set_slice

HEARTBEAT_SECONDS = 0.5
WELCOME_TIMEOUT_SECONDS = 30.0
PROGRESS_INTERVAL_SECONDS = 0.2
EXIT_INTERNAL = 5


class SocketLink:
    """The coordinator at the other end of a socket, and the slab reads for this process."""

    def __init__(self, socket: "zmq.Socket[bytes]", arguments: ChildArguments) -> None:
        self._socket = socket
        self._arguments = arguments
        self._reads: ReadQueue | None = None
        # of the system: ZeroMQ's takes several times as long to wake up. Its descriptor tells only
        # of what came after `poll` looked last, so nothing may come between `poll` and a wait.
        self._poller = select.poll()
        self._poller.register(int(socket.getsockopt(zmq.FD)), select.POLLIN)
        self._notice_fd: int | None = None
        self._polls = False
        self._notices: deque[SlabNotice] = deque()
        self._n_received = 0

    def read_locally(self, queue: ReadQueue) -> None:
        """From now on `ReadSlabs` goes to this queue."""
        self._reads = queue
        self._poller.register(queue.completion_fd, select.POLLIN)

    def hear_readers(self, notice_fd: int) -> None:
        """From now on notices come from this pipe, those first that nobody read before."""
        self._notice_fd = notice_fd
        self._poller.register(notice_fd, select.POLLIN)

    def keep_awake(self) -> None:
        """From now on a wait begins with polling (see `waiting`)."""
        self._polls = True

    def send(self, message: Any) -> None:
        """See `Link`."""
        try:
            self._socket.send(encode(message))
        except zmq.Again as error:
            raise Stopping from error  # a coordinator that takes nothing for so long is gone

    def receive(self) -> Any:
        """See `Link`. Sends heartbeats while it waits."""
        message = poll_for(self.poll) if self._polls else self.poll()
        while message is None:
            if not self._poller.poll(int(HEARTBEAT_SECONDS * 1000)):
                if parent_is_gone(self._arguments.parent_pid):
                    raise Stopping
                # a parent that died since that look takes nothing: the next look sees it
                beat = Heartbeat(self._arguments.process, self._n_received)
                send_now(self._socket, encode(beat))
            message = self.poll()
        return message

    def poll(self) -> Any | None:
        """See `Link`."""
        while True:
            self._look_for_slabs()
            if self._notices:
                return self._notices.popleft()
            if not has_message(self._socket):
                return None
            message = decode(self._socket.recv())
            self._n_received += 1
            match message:
                case Stop():
                    raise Stopping
                case ReadSlabs(reads):
                    self._local_reads.submit(reads)
                case SlotsPunched(slots):
                    self._local_reads.forget(slots)
                case _:
                    return message

    def _look_for_slabs(self) -> None:
        """Slabs that a reader told us of, or that were read in this process."""
        if self._notice_fd is not None:
            self._notices.extend(take_notices(self._notice_fd))
        if self._reads is None:
            return
        for completion in self._reads.collect():
            if isinstance(completion, SlabsReady):
                span = ReadSpan(completion.start_ns, completion.stop_ns)
                self._notices.append(SlabNotice(completion.lease, span))
                self.send(completion._replace(noticed=True))
            else:
                self.send(completion)

    @property
    def _local_reads(self) -> ReadQueue:
        if self._reads is None:
            raise MessageError("link: a message to a reader, but this process does not read")
        return self._reads


def main() -> int:
    """Exit code of the process."""
    try:
        (text,) = sys.argv[1:]
        arguments = decode_arguments(text)
    except (ValueError, MessageError) as error:
        print(f"compute_worker: started by the coordinator only ({error})", file=sys.stderr)
        return EXIT_CONFIGURATION
    birth = begin_life(arguments)
    set_slice(SHORT_NANOSECONDS)  # of the threads that carry messages
    try:
        with (
            zmq.Context(io_threads=1) as context,
            pair_socket(context, arguments.endpoint, bind=False) as socket,
        ):
            set_slice(DEFAULT_NANOSECONDS)  # of those that compute
            return live(arguments, birth, SocketLink(socket, arguments))
    except LinkError as error:
        print(f"{arguments.process}: {error}", file=sys.stderr)
        return EXIT_INTERNAL


def live(arguments: ChildArguments, birth: Birth, link: SocketLink) -> int:
    """From `Hello` to `Stop`; whatever else ends it is told to the coordinator."""
    try:
        settings = greet(arguments, link)
        is_writer = settings.local_reads is not None
        pool = None
        if arguments.pool_fd is not None:
            pool = PoolMapping(arguments.pool_fd, arguments.layout, writable=is_writer)
        queue = local_queue(settings, pool)
        if queue is not None:
            link.read_locally(queue)
        if arguments.notice_fd is not None:
            link.hear_readers(arguments.notice_fd)
        if settings.polls:
            link.keep_awake()
        assembled = assemble(settings, pool, link, progress_teller(link))
        if pool is not None and not is_writer and assembled.experts_in.name == "pool":
            pool.populate(writable=False)  # else it is read past the mapping
        look_seldom()
        link.send(Ready(arguments.process, ready_detail(birth, assembled)))
        serve(link, assembled)
        return 0
    except Stopping:
        return 0
    except EXPECTED as error:
        return fail(arguments, link, *ending(error))
    except Exception as error:
        return fail(arguments, link, EXIT_INTERNAL, f"{type(error).__name__}: {error}")


def greet(arguments: ChildArguments, link: SocketLink) -> ComputeSettings:
    """Say who this is and take the settings."""
    link.send(Hello(PROTOCOL_VERSION, arguments.process, os.getpid(), arguments.token))
    deadline = time.monotonic() + WELCOME_TIMEOUT_SECONDS
    while (welcome := link.poll()) is None:
        if time.monotonic() > deadline:
            raise MessageError(f"link: no Welcome within {WELCOME_TIMEOUT_SECONDS:.0f} s")
        time.sleep(0.002)
    return decode_settings(welcomed(welcome))


def local_queue(settings: ComputeSettings, pool: PoolMapping | None) -> ReadQueue | None:
    """The readers inside this process, if it reads for itself."""
    reads = settings.local_reads
    if reads is None:
        return None
    reader = reader_named(reads.reader, settings.files, pool, drop_cache=reads.drop_cache)
    return ReadQueue(reads.n_threads, reader, pool)


def progress_teller(link: SocketLink) -> Any:
    """A callback (phase, done, total) that sends `Progress` a few times a second."""
    last = 0.0

    def tell(phase: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= PROGRESS_INTERVAL_SECONDS:
            last = now
            link.send(Progress(phase, done, total))

    return tell


def ready_detail(birth: Birth, assembled: Assembled) -> str:
    """What was chosen and measured at start, as JSON."""
    return json.dumps(
        {
            "kernels": assembled.kernels.name,
            "cores": birth.cores,
            "warnings": [*birth.warnings, *assembled.warnings],
            "dense_bytes": assembled.dense_bytes,
            "settings": assembled.settings,
            "experts_in": assembled.experts_in.name,
            "experts_in_because": assembled.experts_in.reason,
        }
    )


def serve(link: SocketLink, assembled: Assembled) -> None:
    """Execute until `Stop`."""
    engine, feed = assembled.engine, assembled.feed
    while True:
        message = link.receive()
        match message:
            case Step():
                link.send(engine.step(message))
                engine.look_ahead()
            case Submit():
                engine.submit(message)
            case Finished():
                engine.finish(message)
            case Forget():
                engine.forget(message)
            case LoadBlocks():
                engine.load(message)
            case SaveBlocks():
                link.send(engine.save(message))
            case _:
                feed.note(message)


def fail(arguments: ChildArguments, link: SocketLink, exit_code: int, text: str) -> int:
    """Tell the coordinator why this process ends; standard error if it cannot be told."""
    try:
        link.send(Failed(arguments.process, exit_code, text))
    except (Stopping, zmq.ZMQError) as error:
        print(
            f"{arguments.process}: {text} (the coordinator hears nothing: {error})",
            file=sys.stderr,
            flush=True,
        )
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
