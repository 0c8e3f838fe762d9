"""The ZeroMQ link between the coordinator and one child: every option set in one place.

One PAIR socket on each side, over ``ipc://`` in a fresh directory of mode 0700::

    /run/user/1000/moe-coord-<pid>-<start time>-<random>/link

The directory decides who may connect, whatever the umask made of the socket file. After `Hello`
the parent removes both, so nothing is on the disk while a run goes on; what a killed start left is
removed by the next one, known by the pid and start time in the name.

Rule: a socket belongs to the thread that made it, and only `__main__` modules hold one. This module
does not know the messages.
"""

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zmq

from shm.birth import start_time
from shm.codec import MAX_MESSAGE_BYTES

LINGER_MILLISECONDS = 300  # long enough for a last `Failed` or `Stop`, short enough for an exit
SEND_TIMEOUT_MILLISECONDS = 10_000  # a peer that takes nothing for so long is gone or hangs
HIGH_WATER_MESSAGES = 1000  # in each direction; the coordinator's own credit stays far below
MAX_PATH_BYTES = 107  # sockaddr_un.sun_path less its final zero
SOCKET_NAME = "link"
_DIRECTORY_NAME = re.compile(r"moe-coord-(\d+)-(\d+)(-\w*)?")


_READABLE = int(zmq.POLLIN)  # `&` with a member of an enumeration runs Python code


class LinkError(Exception):
    """No socket can be made; the text names the directories tried or the limit met."""


def pair_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, *, bind: bool
) -> "zmq.Socket[bytes]":
    """A PAIR socket bound or connected to `endpoint`. The parent binds before it starts the child.

    A send to a peer that is gone raises `zmq.Again` after the timeout; pass `zmq.DONTWAIT` where
    waiting is not allowed. Raises `LinkError`.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)  # the default waits for ever at exit
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MILLISECONDS)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # queue for real connections only
    # The socket file is removed after `Hello`: whoever is found there later is a stranger.
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    # ZeroMQ's own heartbeats stay off: they do not see a stuck main thread, and they would cut a
    # link for good when a stopped process is continued. `Heartbeat` and pidfd do the watching.
    try:
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise LinkError(f"{endpoint}: cannot {'bind' if bind else 'connect'} ({error})") from error
    return socket


def has_message(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message can be received now."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


def send_now(socket: "zmq.Socket[bytes]", data: bytes) -> bool:
    """Send without waiting; False if the peer takes nothing, because it is gone or far behind."""
    try:
        socket.send(data, zmq.DONTWAIT)
    except zmq.Again:
        return False
    return True


def directory_candidates() -> list[Path]:
    """Where a socket directory may lie, best first: in memory and private, then anywhere."""
    return [Path(f"/run/user/{os.getuid()}"), Path("/dev/shm"), Path("/tmp"), Path.cwd()]


def make_socket_directory(candidates: Sequence[Path] | None = None) -> Path:
    """Make a fresh 0700 directory in the first candidate that takes it; raises `LinkError`."""
    pid = os.getpid()
    prefix = f"moe-coord-{pid}-{start_time(pid)}-"
    refused = []
    for parent in directory_candidates() if candidates is None else candidates:
        try:
            directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        except OSError as error:
            refused.append(f"{parent} ({error.strerror})")
            continue
        n_bytes = len(os.fsencode(directory / SOCKET_NAME))
        if n_bytes <= MAX_PATH_BYTES:
            return directory
        directory.rmdir()
        refused.append(f"{parent} (socket path of {n_bytes} bytes, at most {MAX_PATH_BYTES})")
    raise LinkError(f"socket directory: none of these can be used: {', '.join(refused)}")


def endpoint_in(directory: Path) -> str:
    """The address of the one socket in a directory."""
    return f"ipc://{directory / SOCKET_NAME}"


def remove_socket_directory(directory: Path) -> None:
    """Remove socket and directory; whoever is connected stays connected. Done twice, no error."""
    (directory / SOCKET_NAME).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        directory.rmdir()


def remove_left_directories(candidates: Sequence[Path] | None = None) -> list[Path]:
    """Remove the directories of starts that were killed; returns what was removed.

    Only our own user's directories, and only those whose process is gone, are touched.
    """
    removed = []
    for parent in directory_candidates() if candidates is None else candidates:
        try:
            entries = [Path(entry) for entry in os.scandir(parent)]
        except OSError:
            continue  # not there or not ours to list: nothing of ours can be in it
        for directory in filter(_is_left_behind, entries):
            with contextlib.suppress(OSError):  # another start removes the same
                remove_socket_directory(directory)
                removed.append(directory)
    return removed


def _is_left_behind(directory: Path) -> bool:
    name = _DIRECTORY_NAME.fullmatch(directory.name)
    if name is None:
        return False
    try:
        status = directory.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    return start_time(int(name[1])) != int(name[2])
