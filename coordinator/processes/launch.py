"""Starts child processes: the only module that does.

Every spawn is a clean exec (never a fork that goes on), binds a fresh endpoint in a fresh 0700
directory, and gets its descriptors by `pass_fds`. ``-P`` keeps a stray ``shm.py`` in the user's
folder from being imported. Thread counts of numerical libraries are set in the child's environment,
before it can import one. After `Hello` nothing of the endpoint is left on the disk.

Children must be started from the main thread: the kernel sends their death signal when the thread
that started them ends.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from coordinator.processes.limits import ResourceError
from shm.birth import SIGNALS_OF_THE_PARENT, ChildArguments, encode_arguments
from shm.link import endpoint_in, make_socket_directory, pair_socket, remove_socket_directory
from shm.messages import decode
from shm.pool import PoolLayout

Context = zmq.Context["zmq.Socket[bytes]"]
HTTP = "http"  # the name of the service's process that talks to clients

# BLAS and OpenMP must not start threads of their own: the kernels bring theirs
ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start. `settings` answers its `Hello`."""

    name: str  # "io0", …, "compute", "http"
    module: str
    cores: tuple[int, ...]
    pool_fd: int | None
    layout: PoolLayout
    file_fds: tuple[int, ...]
    other_fds: tuple[int, ...]
    settings: bytes
    notice_fd: int | None = None  # its end of the pipe of `shm.notices`
    decode: Callable[[bytes], Any] = decode  # of what it sends


@dataclass(slots=True)
class Child:
    """A running child. `is_ready` from its `Ready` on; `detail` is what that said."""

    spec: ChildSpec
    process: subprocess.Popen[bytes]
    pidfd: int
    socket: "zmq.Socket[bytes]"
    token: str
    directory: Path
    started_ns: int
    is_ready: bool = False
    said_hello: bool = False
    n_done: int = 0  # of its last `Heartbeat`
    detail: dict[str, object] = field(default_factory=dict)
    failure: tuple[int, str] | None = None  # exit code and text of its `Failed`
    is_condemned: bool = False  # to be killed, dead perhaps: nothing is expected of it
    killed_because: str = ""  # why we killed it

    @property
    def name(self) -> str:
        """Its name in messages and metrics."""
        return self.spec.name

    @property
    def warnings(self) -> list[str]:
        """What it could not have at its start."""
        found = self.detail.get("warnings")
        return [str(text) for text in found] if isinstance(found, list) else []

    def remove_endpoint(self) -> None:
        """Socket file and directory, once the child is connected or gone."""
        remove_socket_directory(self.directory)

    def kill(self, why: str) -> None:
        """SIGKILL, if it lives; the death is seen like any other."""
        if self.process.poll() is None:
            self.killed_because = why
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self, timeout_seconds: float) -> bool:
        """Whether it ends in time."""
        try:
            self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def reap(self) -> int:
        """Exit code of a child that is dead; negative: the signal."""
        return self.process.wait()

    def close(self) -> None:
        """Reap it (it is dead) and close what belongs to it."""
        self.reap()
        self.remove_endpoint()
        self.socket.close()
        os.close(self.pidfd)


def start_child(context: Context, spec: ChildSpec, now_ns: int) -> Child:
    """Start one child; raises `LinkError`, `OSError`, `ResourceError`."""
    assert threading.current_thread() is threading.main_thread(), "children die with this thread"
    directory = make_socket_directory()
    token = secrets.token_hex(16)
    try:
        link = pair_socket(context, endpoint_in(directory), bind=True)
    except BaseException:
        remove_socket_directory(directory)
        raise
    arguments = ChildArguments(
        process=spec.name,
        endpoint=endpoint_in(directory),
        token=token,
        parent_pid=os.getpid(),
        cores=spec.cores,
        pool_fd=spec.pool_fd,
        layout=spec.layout,
        file_fds=spec.file_fds,
        notice_fd=spec.notice_fd,
    )
    command = [sys.executable, "-P", "-m", spec.module, encode_arguments(arguments)]
    shared_fds = [fd for fd in (spec.pool_fd, spec.notice_fd) if fd is not None]
    try:
        with _signals_held_back():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # standard output is for generated text only
                pass_fds=(*shared_fds, *spec.file_fds, *spec.other_fds),
                env={**os.environ, **ONE_THREAD},
            )
    except BaseException as error:
        link.close()
        remove_socket_directory(directory)
        if isinstance(error, BlockingIOError):  # others of this user came, or cannot be seen
            raise ResourceError(
                f"processes: expected to start {spec.name}, found the limit of processes reached "
                "(`ulimit -u`, or pids.max of a cgroup); raise it"
            ) from error
        raise
    pidfd = os.pidfd_open(process.pid)
    return Child(spec, process, pidfd, link, token, directory, now_ns)


def start_renderer(connection: socket.socket) -> "subprocess.Popen[bytes]":
    """Start the process that renders chat templates; it ends with the other end of `connection`.

    It gets nothing but this socket, as its standard input, and an empty environment.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "coordinator.api.render"],
        stdin=connection.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
    )


def start_own_service(arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start ``moe-coord`` with these arguments; it ends with this process at the latest.

    It is in a process group of its own, so that Ctrl-C at the terminal is not meant for it, and
    what it says comes through the pipe of its standard error.
    """
    command = [sys.executable, "-P", "-m", "coordinator.own_service", str(os.getpid()), *arguments]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0,
    )


def stop_own_service(process: "subprocess.Popen[bytes]", timeout_seconds: float) -> None:
    """Let it end, or end it."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_seconds)
    process.kill()
    process.wait()


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block what a child must not hear until it ignores it: it inherits the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
