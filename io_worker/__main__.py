"""An I/O worker: ``python -P -m io_worker ARGUMENTS``.

Its whole life: be born, connect, `Hello`, `Welcome`, try the readers, `Ready`; then read what it is
told and answer, with a `Heartbeat` twice a second, until `Stop`. It decides nothing. Whatever goes
wrong ends it with a `Failed` and a nonzero exit code.
"""

import json
import math
import os
import select
import sys
import time
from typing import Any

import zmq

from io_worker.page_cache import WARMERS, CacheWarmer
from io_worker.probe import ReaderChoice, choose_reader
from io_worker.read_queue import ReadQueue, ThreadsError
from io_worker.settings import IoSettings, decode_settings
from io_worker.slab_reader import SlabReader, reader_named
from shm.birth import Birth, ChildArguments, begin_life, decode_arguments, parent_is_gone
from shm.codec import MessageError
from shm.garbage import look_seldom
from shm.link import LinkError, has_message, pair_socket, send_now
from shm.messages import (
    PROTOCOL_VERSION,
    Failed,
    Heartbeat,
    Hello,
    ReadSlabs,
    Ready,
    SlotsPunched,
    Stop,
    decode,
    encode,
    welcomed,
)
from shm.pool import PoolError, PoolMapping
from shm.time_slices import SHORT_NANOSECONDS, set_slice

HEARTBEAT_SECONDS = 0.5
WELCOME_TIMEOUT_SECONDS = 30.0
EXIT_CONFIGURATION, EXIT_RESOURCES, EXIT_INTERNAL = 2, 4, 5

Link = zmq.Socket[bytes]


def main() -> int:
    """Exit code of the process."""
    try:
        (text,) = sys.argv[1:]
        arguments = decode_arguments(text)
    except (ValueError, MessageError) as error:
        print(f"io_worker: started by the coordinator only ({error})", file=sys.stderr)
        return EXIT_CONFIGURATION
    birth = begin_life(arguments)
    set_slice(SHORT_NANOSECONDS)
    try:
        with (
            zmq.Context(io_threads=1) as context,
            pair_socket(context, arguments.endpoint, bind=False) as link,
        ):
            return live(arguments, birth, link)
    except LinkError as error:
        print(f"{arguments.process}: {error}", file=sys.stderr)
        return EXIT_INTERNAL


def live(arguments: ChildArguments, birth: Birth, link: Link) -> int:
    """From `Hello` to `Stop`; whatever else ends it is told to both ends."""
    try:
        settings = greet(arguments, link)
        pool = map_pool(arguments, settings)
        choice = choose_reader(settings.reader, settings.files)
        reader = reader_named(choice.name, settings.files, pool, drop_cache=settings.drop_cache)
        queue = ReadQueue(settings.queue_depth, reader, pool, arguments.notice_fd)
        look_seldom()
        link.send(encode(Ready(arguments.process, ready_detail(birth, choice, settings))))
        serve(arguments, link, queue, reader)
        if queue.close() and pool is not None:
            pool.close()
        return 0
    except (PoolError, ThreadsError, MemoryError) as error:
        return fail(arguments, link, EXIT_RESOURCES, str(error) or "out of memory")
    except Exception as error:
        return fail(arguments, link, EXIT_INTERNAL, f"{type(error).__name__}: {error}")


def greet(arguments: ChildArguments, link: Link) -> IoSettings:
    """Say who this is and take the settings."""
    link.send(encode(Hello(PROTOCOL_VERSION, arguments.process, os.getpid(), arguments.token)))
    if not link.poll(int(WELCOME_TIMEOUT_SECONDS * 1000)):
        raise MessageError(f"link: no Welcome within {WELCOME_TIMEOUT_SECONDS:.0f} s")
    welcome = decode(link.recv())
    return decode_settings(welcomed(welcome), arguments.file_fds)


def map_pool(arguments: ChildArguments, settings: IoSettings) -> PoolMapping | None:
    """The pool to write to; None where the page cache is only warmed. Raises `PoolError`."""
    if (arguments.pool_fd is None) != (settings.reader in WARMERS):
        raise MessageError(f"arguments: reader {settings.reader} and the pool do not fit together")
    if arguments.pool_fd is None:
        return None
    return PoolMapping(arguments.pool_fd, arguments.layout, writable=True)


def ready_detail(birth: Birth, choice: ReaderChoice, settings: IoSettings) -> str:
    """What was chosen at start, as JSON."""
    detail: dict[str, Any] = {
        "reader": choice.name,
        "reason": choice.reason,
        "queue_depth": settings.queue_depth,
        "cores": birth.cores,
        "warnings": birth.warnings,
    }
    return json.dumps(detail)


def serve(
    arguments: ChildArguments, link: Link, queue: ReadQueue, reader: SlabReader | CacheWarmer
) -> None:
    """Read and answer until `Stop` or until the parent is gone."""
    # The system's own poll: ZeroMQ's takes several times as long, and the reading threads have
    # their turn when this one sleeps. The link's descriptor tells only of what came after its
    # events were looked at, so nothing is sent between that look and the wait.
    poller = select.poll()
    poller.register(int(link.getsockopt(zmq.FD)), select.POLLIN)
    poller.register(queue.completion_fd, select.POLLIN)
    next_beat = time.monotonic()
    while True:
        while has_message(link):
            message = decode(link.recv())
            match message:
                case Stop():
                    return
                case ReadSlabs(reads):
                    queue.submit(reads)
                case SlotsPunched(slots):
                    queue.forget(slots)
                case _:
                    raise MessageError(f"link: unexpected {type(message).__name__}")
        wait_seconds = max(0.0, next_beat - time.monotonic())
        ready = poller.poll(math.ceil(wait_seconds * 1000))
        if any(fd == queue.completion_fd for fd, _ in ready):
            for completion in queue.collect():
                link.send(encode(completion))
        if time.monotonic() >= next_beat:
            next_beat = time.monotonic() + HEARTBEAT_SECONDS
            for line in reader.new_refusals():
                print(f"{arguments.process}: {line}", file=sys.stderr, flush=True)
            if parent_is_gone(arguments.parent_pid):
                return
            # a parent that died since that look takes nothing: the next look sees it
            send_now(link, encode(Heartbeat(arguments.process, queue.n_done)))


def fail(arguments: ChildArguments, link: Link, exit_code: int, text: str) -> int:
    """Tell the coordinator why this process ends; standard error if it cannot be told."""
    try:
        link.send(encode(Failed(arguments.process, exit_code, text)), zmq.DONTWAIT)
    except zmq.ZMQError as error:
        print(
            f"{arguments.process}: {text} (the coordinator hears nothing: {error})",
            file=sys.stderr,
            flush=True,
        )
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
