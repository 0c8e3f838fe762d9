"""``moe-coord`` as a running process that a test can signal, and what of it is left afterwards."""

import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from arms import PROGRAM

from shm.birth import decode_arguments
from shm.codec import MessageError
from shm.link import directory_candidates

WAIT_SECONDS = 60.0  # for a machine that is busy with other things
GONE_SECONDS = 20.0
MARKER = "MOE_COORD_TEST_MARKER"  # its children inherit the environment
HOST = "127.0.0.1"
RESERVED: list[socket.socket] = []  # until this process ends


class RunningProgram:
    """The program in a process group of its own. Use as a context manager."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        self.marker = uuid.uuid4().hex
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options}
        environment = {**os.environ, **options.pop("env", {}), MARKER: self.marker}
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment,
            **options,
        )
        self._seen = b""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)

    @staticmethod
    def command(*arguments: str) -> list[str]:
        """The program and its arguments, for tests that start it themselves."""
        return [*PROGRAM, *arguments]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(WAIT_SECONDS)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def errors(self) -> str:
        """Standard error so far."""
        assert self.process.stderr is not None
        while data := self.process.stderr.read():
            self._seen += data
        return self._seen.decode()

    def wait_for(self, text: str) -> None:
        """Until this stands on standard error."""
        wait_until(lambda: text in self.errors() or self.process.poll() is not None)
        assert text in self.errors()

    def wait_for_output(self) -> bytes:
        """Until something stands on standard output: the answer has begun."""
        assert self.process.stdout is not None
        return os.read(self.process.stdout.fileno(), 65536)

    def end(self, timeout_seconds: float = WAIT_SECONDS) -> int:
        """Wait for its exit code."""
        deadline = time.monotonic() + timeout_seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.errors()  # a full pipe would stop it
            if self.process.stdout is not None and not self.process.stdout.closed:
                os.set_blocking(self.process.stdout.fileno(), False)
                self.process.stdout.read()
            time.sleep(0.01)
        code = self.process.poll()
        assert code is not None, f"runs on after {timeout_seconds} s: {self.errors()}"
        return code

    def alive(self) -> list[int]:
        """Processes that carry its marker."""
        return [pid for pid, environment in _environments() if self.marker in environment]

    def children(self) -> dict[str, int]:
        """Pids of its children by process name."""
        found = {}
        for pid in self.alive():
            with suppress(OSError, MessageError, IndexError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                found[decode_arguments(command[-2]).process] = pid
        return found

    def check_gone(self, seconds: float = GONE_SECONDS) -> None:
        """No process of it is left after this time at most."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"{len(left)} processes are left"

    def files(self) -> list[Path]:
        """Directories of its sockets."""
        return socket_directories(self.process.pid)


def socket_directories(pid: int) -> list[Path]:
    """Socket directories of a process that lives or lived."""
    parents = [parent for parent in directory_candidates() if parent.is_dir()]
    return [found for parent in parents for found in parent.glob(f"moe-coord-{pid}-*")]


def reserved_port() -> socket.socket:
    """A socket with a port of the loopback address; nobody else is given the port while it is open.

    Nobody listens on it, so a connection is refused; whoever asks for the port by its number, and
    sets SO_REUSEADDR as servers do, may listen on it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((HOST, 0))
    return reserved


def free_port() -> int:
    """Such a port, until the tests end."""
    RESERVED.append(reserved_port())
    return port_of(RESERVED[-1])


def port_of(bound: socket.socket) -> int:
    """Where this socket is bound."""
    port: int = bound.getsockname()[1]
    return port


def service_flags() -> tuple[str, ...]:
    """For a service beside others on the same machine."""
    return ("--port", str(free_port()), "--metrics-port", "0")


def wait_until(is_over: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Poll; the test fails when it takes too long."""
    deadline = time.monotonic() + seconds
    while not is_over():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def _environments() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    yield int(entry.name), (entry / "environ").read_bytes().decode(errors="replace")
