"""The HTTP process: ``python -P -m coordinator.api ARGUMENTS``.

Its whole life: be born, connect, `Hello`, `Welcome`, build the tokenizer, `Ready`; then serve until
`Stop`. One event loop; what would hold it up runs in one thread beside it.
"""

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
import zmq

from coordinator.api.app import build_app
from coordinator.api.backend import Backend
from coordinator.api.chat import ChatTemplate
from coordinator.api.counts import HttpCounts
from coordinator.api.entrance import Entrance
from coordinator.api.guard import MAX_HEAD_BYTES, Guard
from coordinator.api.protocol import KEEP_ALIVE_SECONDS, LimitedProtocol
from coordinator.api.service import Service
from coordinator.api.settings import HttpSettings, decode_settings
from coordinator.processes.launch import start_renderer
from coordinator.text.tokenizer import Tokenizer, TokenizerError, build_tokenizer
from io_worker.gguf_header import ModelFormatError
from io_worker.model_file import open_model
from shm.birth import Birth, ChildArguments, begin_life, decode_arguments, parent_is_gone
from shm.codec import MessageError
from shm.free_memory import give_back_freed
from shm.link import LinkError, has_message, pair_socket
from shm.messages import PROTOCOL_VERSION, Failed, Heartbeat, Hello, Ready, Stop, welcomed
from shm.service_messages import decode, encode
from shm.time_slices import DEFAULT_NANOSECONDS, set_slice

WELCOME_MILLISECONDS = 30_000
TICK_SECONDS = 0.5
MAX_CONNECTIONS = 1000  # each is cut off when it is slow, so a crowd of slow ones is survived
LAST_SECONDS = 3  # for answers under way after `Stop`
EXIT_CONFIGURATION, EXIT_MODEL, EXIT_INTERNAL = 2, 3, 5


class Server(uvicorn.Server):
    """Signals are the coordinator's: it says `Stop`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them as they are."""
        yield


class CoordinatorLink:
    """The coordinator at the other end of a socket, in an event loop. `receive` gets its messages.

    ZeroMQ's descriptor tells of changes only, and a send may use one up: so all that is there is
    read whenever it tells, and after every send.
    """

    def __init__(self, link: "zmq.Socket[bytes]", receive: Callable[[Any], None]) -> None:
        self.is_lost = False
        self._link = link
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(int(link.getsockopt(zmq.FD)), self._read)

    def send(self, message: Any) -> None:
        """Send without waiting; a coordinator that takes nothing is gone."""
        try:
            self._link.send(encode(message), zmq.DONTWAIT)
        except zmq.ZMQError:
            self.is_lost = True
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Read no more."""
        self._loop.remove_reader(int(self._link.getsockopt(zmq.FD)))

    def _read(self) -> None:
        while has_message(self._link):
            self._receive(decode(self._link.recv()))


def main() -> int:
    """Exit code of the process."""
    try:
        (text,) = sys.argv[1:]
        arguments = decode_arguments(text)
    except (ValueError, MessageError) as error:
        print(f"coordinator.api: started by the coordinator only ({error})", file=sys.stderr)
        return EXIT_CONFIGURATION
    birth = begin_life(arguments)
    set_slice(DEFAULT_NANOSECONDS)  # its parent's is short
    try:
        with (
            zmq.Context(io_threads=1) as context,
            pair_socket(context, arguments.endpoint, bind=False) as link,
        ):
            return live(arguments, birth, link)
    except LinkError as error:
        print(f"{arguments.process}: {error}", file=sys.stderr)
        return EXIT_INTERNAL


def live(arguments: ChildArguments, birth: Birth, link: "zmq.Socket[bytes]") -> int:
    """From `Hello` to `Stop`; whatever else ends it is told to the coordinator."""
    try:
        settings = greet(arguments, link)
        tokenizer, template = load(settings)
        give_back_freed()
        asyncio.run(serve(arguments, birth, link, settings, tokenizer, template))
        return 0
    except (ModelFormatError, TokenizerError) as error:
        return fail(arguments, link, EXIT_MODEL, str(error))
    except Exception as error:
        return fail(arguments, link, EXIT_INTERNAL, f"{type(error).__name__}: {error}")


def greet(arguments: ChildArguments, link: "zmq.Socket[bytes]") -> HttpSettings:
    """Say who this is and take the settings."""
    link.send(encode(Hello(PROTOCOL_VERSION, arguments.process, os.getpid(), arguments.token)))
    if not link.poll(WELCOME_MILLISECONDS):
        raise MessageError(f"link: no Welcome within {WELCOME_MILLISECONDS // 1000} s")
    return decode_settings(welcomed(decode(link.recv())))


def load(settings: HttpSettings) -> tuple[Tokenizer, ChatTemplate]:
    """What the model file says of text. Raises `ModelFormatError`, `TokenizerError`."""
    model = open_model(Path(settings.model_path))
    if model.fingerprint != settings.fingerprint:
        raise ModelFormatError(settings.model_path, "header", "model changed on disk; start again")
    tokenizer = build_tokenizer(model.metadata, settings.model_path)
    return tokenizer, ChatTemplate(model.metadata, tokenizer, start_renderer)


async def serve(
    arguments: ChildArguments,
    birth: Birth,
    socket_to_coordinator: "zmq.Socket[bytes]",
    settings: HttpSettings,
    tokenizer: Tokenizer,
    template: ChatTemplate,
) -> None:
    """Until `Stop`, or until the coordinator is gone."""
    ended, knows_state = asyncio.Event(), asyncio.Event()

    def receive(message: Any) -> None:
        if isinstance(message, Stop):
            ended.set()
        else:
            backend.receive(message)
            knows_state.set()

    counts = HttpCounts()
    link = CoordinatorLink(socket_to_coordinator, receive)
    backend = Backend(link.send, settings, counts)
    with (
        contextlib.closing(link),
        contextlib.closing(template),
        ThreadPoolExecutor(1, "text") as threads,
    ):
        service = Service(settings, backend, tokenizer, template, int(time.time()), threads)
        server = build_server(Entrance(build_app(service), Guard(settings), counts))
        warnings = [*birth.warnings, *template.warnings]
        detail = {"cores": birth.cores, "warnings": warnings}
        link.send(Ready(arguments.process, json.dumps(detail)))
        serving = asyncio.create_task(serve_when(knows_state, server, listener(settings)))
        n_ticks = 0
        while not (ended.is_set() or link.is_lost or parent_is_gone(arguments.parent_pid)):
            n_ticks += 1
            link.send(Heartbeat(arguments.process, n_ticks))
            growth = counts.take(backend.n_queued)
            if growth is not None:
                link.send(growth)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await ended.wait()
        server.should_exit = True
        knows_state.set()
        await serving


async def serve_when(
    knows_state: asyncio.Event, server: "Server", listening: socket.socket
) -> None:
    """Connections wait until it is known whether requests can be answered, which is soon."""
    await knows_state.wait()
    await server.serve([listening])


def build_server(app: Entrance) -> Server:
    """uvicorn with every limit that it has, and some that it has not (`protocol`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 64
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not what strangers send
    return Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=LAST_SECONDS,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
    )


def listener(settings: HttpSettings) -> socket.socket:
    """The socket that the coordinator has bound."""
    return socket.socket(fileno=settings.listener_fd)


def fail(arguments: ChildArguments, link: "zmq.Socket[bytes]", exit_code: int, text: str) -> int:
    """Tell the coordinator why this process ends; standard error if it cannot be told."""
    try:
        link.send(encode(Failed(arguments.process, exit_code, text)))
    except zmq.ZMQError as error:
        print(
            f"{arguments.process}: {text} (the coordinator hears nothing: {error})",
            file=sys.stderr,
            flush=True,
        )
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
