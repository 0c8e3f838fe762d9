"""A small parent for tests: starts a real I/O worker and talks to it. No test by itself."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

import shm
from io_worker.reader import ModelFile, descriptors
from io_worker.settings import IoSettings, encode_settings
from shm.birth import ChildArguments, encode_arguments
from shm.link import endpoint_in, make_socket_directory, pair_socket, remove_socket_directory
from shm.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    ReadSlabs,
    Ready,
    SlabRead,
    Stop,
    Welcome,
    decode,
    encode,
)
from shm.pool import PoolLayout

SOURCE_FOLDER = Path(shm.__file__).parent.parent
TOKEN = "the run's token"
TIMEOUT_SECONDS = 20.0


class WorkerParent:
    """Parent's end of one I/O worker: `process`, and messages by `send` and `next`."""

    def __init__(
        self,
        files: Sequence[ModelFile],
        layout: PoolLayout,
        pool_fd: int | None,
        *,
        folder: Path | None = None,
        sockets: Path = Path("/tmp"),
        cores: tuple[int, ...] = (),
        reader: str = "auto",
        prefix: Sequence[str] = (),
        program: Sequence[str] = ("-m", "io_worker"),
        **changes: Any,
    ) -> None:
        self.settings = IoSettings(tuple(files), reader, 2, False)
        self.directory = make_socket_directory([sockets])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = endpoint_in(self.directory)
        self.link = pair_socket(self._context, endpoint, bind=True)
        arguments = ChildArguments(
            "io0", endpoint, TOKEN, os.getpid(), cores, pool_fd, layout, descriptors(files)
        )
        self.arguments = replace(arguments, **changes)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-P", *program, encode_arguments(self.arguments)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(SOURCE_FOLDER)},
            pass_fds=(*([] if pool_fd is None else [pool_fd]), *descriptors(files)),
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "WorkerParent":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(TIMEOUT_SECONDS)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.link.close(linger=0)
        self._context.term()
        remove_socket_directory(self.directory)

    def send(self, message: Any) -> None:
        self.link.send(encode(message))

    def next(self, timeout_seconds: float = TIMEOUT_SECONDS, *, beats: bool = False) -> Any:
        """The next message, None after the timeout; heartbeats only if asked for."""
        deadline = time.monotonic() + timeout_seconds
        while self.link.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            message = decode(self.link.recv())
            if beats or not isinstance(message, Heartbeat):
                return message
        return None

    def greet(self) -> Ready:
        """Through `Hello` and `Welcome` to `Ready`."""
        hello = self.next()
        assert hello == Hello(PROTOCOL_VERSION, "io0", self.process.pid, TOKEN), hello
        remove_socket_directory(self.directory)
        self.send(Welcome(PROTOCOL_VERSION, encode_settings(self.settings)))
        ready = self.next()
        assert isinstance(ready, Ready), ready
        return ready

    def read(self, *reads: SlabRead) -> list[Any]:
        """Order slabs and wait for all answers."""
        self.send(ReadSlabs(reads))
        return [self.next() for _ in reads]

    def stop(self) -> int:
        self.send(Stop())
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_SECONDS)

    def errors(self) -> str:
        """What the ended worker wrote to standard error."""
        assert self.process.stderr is not None
        return self.process.stderr.read()
