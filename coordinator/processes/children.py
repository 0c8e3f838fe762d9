"""The child processes of a run: starts them, carries messages, sees deaths, ends them.

What a message or a death means is the engine's business; here is only what makes a child ours:
that it says `Hello` as the process that was started, and that it is reaped when it is dead. With
`launch` this is the only module of the coordinator that touches sockets.
"""

import contextlib
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from coordinator.processes.launch import Child, ChildSpec, start_child
from coordinator.processes.ready_detail import detail_of
from shm.codec import MessageError
from shm.link import has_message, remove_left_directories, send_now
from shm.messages import (
    PROTOCOL_VERSION,
    Failed,
    Heartbeat,
    Hello,
    Ready,
    Stop,
    Welcome,
    encode,
)

STOP_TIMEOUT_SECONDS = 5.0
MAX_MESSAGES_AT_ONCE = 200  # of one child before the others have their turn
MAX_LAST_MESSAGES = 100_000  # of a dead child: all that can be under way is far less
LAST_WORDS_MILLISECONDS = 200  # a `Failed` may be on its way when its sender is dead already


class Arrived(NamedTuple):
    """A child sent a message."""

    child: Child
    message: Any


@dataclass(frozen=True, slots=True)
class Misbehaved:
    """A child sent what it must not send; whoever hears it kills it."""

    child: Child
    why: str


@dataclass(frozen=True, slots=True)
class Died:
    """A child is dead and reaped. Nothing of it is left."""

    child: Child
    code: int  # negative: the signal

    @property
    def why(self) -> str:
        """For people: what it said itself, what we killed it for, or how it ended."""
        if self.child.failure is not None:
            return self.child.failure[1]
        how = f"signal {-self.code}" if self.code < 0 else f"exit {self.code}"
        return self.child.killed_because or how


News = Arrived | Misbehaved | Died


class Children:
    """All children by name. Use as a context manager; nothing of them is left behind it."""

    def __init__(self) -> None:
        self._by_name: dict[str, Child] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        # The system's own poll: ZeroMQ's takes several times as long. A link's descriptor tells
        # only of what came after its events were looked at: nothing is sent between that and a wait
        self._poller = select.poll()
        self._by_pidfd: dict[int, Child] = {}

    def __enter__(self) -> "Children":
        remove_left_directories()
        return self

    def __exit__(self, *_: object) -> None:
        for child in self:
            child.kill("the run ends")
            self._forget(child)
        self._context.destroy(linger=0)

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> Child | None:
        """The living child of a name."""
        return self._by_name.get(name)

    def start(self, spec: ChildSpec, now_ns: int) -> Child:
        """Start one; raises `LinkError` or `OSError`."""
        child = start_child(self._context, spec, now_ns)
        self._by_name[spec.name] = child
        self._poller.register(int(child.socket.getsockopt(zmq.FD)), select.POLLIN)
        self._poller.register(child.pidfd, select.POLLIN)
        self._by_pidfd[child.pidfd] = child
        return child

    def wait(self, timeout_seconds: float) -> list[News]:
        """What happened, in order for each child; waits for the first of it."""
        news = self._read_all()
        events = self._poller.poll(0 if news else int(timeout_seconds * 1000))
        news = news or self._read_all()
        for child in [self._by_pidfd[fd] for fd, _ in events if fd in self._by_pidfd]:
            news += self._last_of(child)
        return news

    def send(self, name: str, message: Any) -> bool:
        """Send without waiting; False if the child takes nothing.

        A dead child takes all: its death is or will be told, and takes care of what it held.
        """
        child = self._by_name.get(name)
        return child is None or send_now(child.socket, encode(message))

    def kill(self, child: Child, why: str) -> None:
        """SIGKILL, if it is still the living one of its name; its death is told like any other."""
        if self._by_name.get(child.name) is child:
            child.kill(why)

    def stop_all(self) -> None:
        """Ask those that are ready to end, and wait. Those that still start are killed."""
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        for child in self:
            if not child.is_ready or not self.send(child.name, Stop()):
                child.kill("the run ends")
        for child in self:
            child.wait(max(0.0, deadline - time.monotonic()))

    def _read_all(self) -> list[News]:
        return [news for child in self for news in self._read(child, MAX_MESSAGES_AT_ONCE)]

    def _read(self, child: Child, n_messages: int) -> Iterator[News]:
        with contextlib.suppress(zmq.Again):
            for _ in range(n_messages):
                if not has_message(child.socket):  # asking is cheaper than an exception
                    return
                news = self._news_of(child, child.socket.recv(zmq.DONTWAIT))
                if news is not None:
                    yield news

    def _last_of(self, child: Child) -> Iterator[News]:
        """An answer of a dead child still counts, and a `Failed` says why it died."""
        yield from self._read(child, MAX_LAST_MESSAGES)
        code = child.reap()
        if code > 0 and child.failure is None and child.socket.poll(LAST_WORDS_MILLISECONDS):
            yield from self._read(child, MAX_LAST_MESSAGES)
        self._forget(child)
        yield Died(child, code)

    def _forget(self, child: Child) -> None:
        self._poller.unregister(int(child.socket.getsockopt(zmq.FD)))
        self._poller.unregister(child.pidfd)
        del self._by_pidfd[child.pidfd]
        del self._by_name[child.name]
        child.close()

    def _news_of(self, child: Child, data: bytes) -> News | None:
        try:
            message = child.spec.decode(data)
            if isinstance(message, Ready):
                child.detail = detail_of(message)
        except MessageError as error:
            return Misbehaved(child, f"sent rubbish ({error})")
        match message:
            case Hello() if not child.said_hello:
                return self._welcome(child, message)
            case _ if not child.said_hello:
                return Misbehaved(child, f"sent {type(message).__name__} before Hello")
            case Heartbeat(_, n_done):
                child.n_done = n_done
                return None
            case Failed(_, exit_code, text):
                child.failure = (exit_code, text)
                return None
        return Arrived(child, message)

    def _welcome(self, child: Child, hello: Hello) -> News | None:
        expected = (PROTOCOL_VERSION, child.name, child.process.pid, child.token)
        if (hello.protocol, hello.process, hello.pid, hello.token) != expected:
            return Misbehaved(child, "is not the process that was started")
        child.said_hello = True
        child.remove_endpoint()
        if not self.send(child.name, Welcome(PROTOCOL_VERSION, child.spec.settings)):
            return Misbehaved(child, "takes no messages")
        return None
