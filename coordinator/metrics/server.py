"""Serves the metrics over HTTP, on loopback unless told otherwise, in a thread of its own.

    GET /metrics            all processes, for people
    GET /metrics/<process>  one process, for Prometheus; 503 while it is down
    GET /targets            the list of those targets, as Prometheus' http_sd wants it

One thread serves all connections, a limited number at once and each for a limited time, so that a
hung scraper or a crowd of them holds up nobody else, least of all the loop: what they share with it
is the interpreter's lock, for `SWITCH_SECONDS` at a time. Knows nothing of what the pages say.
"""

import asyncio
import contextlib
import json
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus

from coordinator.command.flag_values import ConfigError
from coordinator.metrics.exposition import CONTENT_TYPE, Exposition

HOST = "127.0.0.1"
MAX_CONNECTIONS = 64
MAX_HEADER_BYTES = 8192
CONNECTION_SECONDS = 5.0  # to ask and to take the answer: more than any scrape timeout that is met
SWITCH_SECONDS = 0.0005  # 5 ms is the default: 30 times what a message takes
STOP_SECONDS = 2.0
PLAIN, JSON = "text/plain; charset=utf-8", "application/json"


@dataclass(frozen=True, slots=True)
class Response:
    """What is answered."""

    status: HTTPStatus
    content_type: str
    body: bytes

    def encode(self) -> bytes:
        """As HTTP/1.1 with a closed connection after it."""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + self.body


def listen(port: int, host: str = HOST) -> socket.socket:
    """The listening socket; raises `ConfigError` if the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # a port whose last connections still linger is free: `create_server` sees to that
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise ConfigError(
            f"--metrics-port: expected a port of {host} that is free, found {port}: "
            f"{error.strerror}; use another, or end what listens there"
        ) from error


@contextlib.contextmanager
def serving(
    listener: socket.socket,
    exposition: Exposition,
    connection_seconds: float = CONNECTION_SECONDS,
) -> Iterator[None]:
    """Serve while the `with` lasts; nobody is connected for longer than `connection_seconds`."""
    server = _Server(exposition, f"{HOST}:{listener.getsockname()[1]}", connection_seconds)
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def live() -> None:
        # signals are the main thread's: it has to wake up for them
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(server.serve(listener, stop))

    thread = threading.Thread(target=live, name="metrics", daemon=True)
    interval_before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(STOP_SECONDS)
        sys.setswitchinterval(interval_before)


def respond(head: bytes, exposition: Exposition, own_address: str) -> Response:
    """The answer to a request by its head; `own_address` is for one that does not name a host."""
    words = head.partition(b"\r\n")[0].decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return _plain(HTTPStatus.BAD_REQUEST, "expected an HTTP/1 request")
    method, path = words[0], words[1].partition("?")[0]
    if method != "GET":
        return _plain(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET")
    if path == "/metrics":
        return Response(HTTPStatus.OK, CONTENT_TYPE, exposition.page_of_all())
    if path == "/targets":
        return Response(
            HTTPStatus.OK, JSON, _targets(exposition, _asked_address(head) or own_address)
        )
    process = path.removeprefix("/metrics/")
    if process not in exposition.processes:
        return _plain(HTTPStatus.NOT_FOUND, "try /metrics or /targets")
    page = exposition.page(process)
    if page is None:
        return _plain(HTTPStatus.SERVICE_UNAVAILABLE, f"{process} is down")
    return Response(HTTPStatus.OK, CONTENT_TYPE, page)


def _plain(status: HTTPStatus, text: str) -> Response:
    return Response(status, PLAIN, f"{text}\n".encode())


def _asked_address(head: bytes) -> str | None:
    """The address under which the scraper knows this server: it is told the same again."""
    match = re.search(rb"\r\nhost:[ \t]*([\w.:\[\]-]{1,255})[ \t]*\r\n", head, re.IGNORECASE)
    return match[1].decode() if match is not None else None


def _targets(exposition: Exposition, address: str) -> bytes:
    """One target per process: the same address, a path and a label of its own."""
    targets = [
        {
            "targets": [address],
            "labels": {"__metrics_path__": f"/metrics/{process}", "process": process},
        }
        for process in exposition.processes
    ]
    return json.dumps(targets).encode()


class _Server:
    """Connections of the serving thread, each a task."""

    def __init__(self, exposition: Exposition, address: str, connection_seconds: float) -> None:
        self._exposition = exposition
        self._address = address
        self._connection_seconds = connection_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket, stop: asyncio.Event) -> None:
        """Until `stop`; then nobody is connected."""
        server = await asyncio.start_server(self._connected, sock=listener, limit=MAX_HEADER_BYTES)
        await stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._answer(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also if it never began

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one answer; one who hangs, leaves or is no scraper gets none."""
        gone = (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with contextlib.suppress(*gone):
            async with asyncio.timeout(self._connection_seconds):
                head = await reader.readuntil(b"\r\n\r\n")
                # `drain` returns when all is sent, not when it is merely buffered
                writer.transport.set_write_buffer_limits(0)
                writer.write(self._respond(head).encode())
                await writer.drain()

    def _respond(self, head: bytes) -> Response:
        try:
            return respond(head, self._exposition, self._address)
        except Exception as error:  # a fault of ours: say it to who can see it
            text = f"{type(error).__name__}: {error}"
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, text)
