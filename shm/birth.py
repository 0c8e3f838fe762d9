"""How a child process is born: what it was told, and the first things it does.

A child is started as ``python -P -m io_worker ARGUMENTS``; `ARGUMENTS` is one text, the packed
`ChildArguments`. It stands in the process list, so it holds nothing that would open a door: the
run's token only tells a stranger on the socket apart, and the socket lies in a 0700 directory.

`begin_life` must run before anything starts a thread (numpy, ZeroMQ): threads inherit the cores
that are set then. The parent must start children from its main thread: the kernel sends the death
signal when the parent *thread* ends.

This module knows no package's settings (see `messages.Welcome`) and opens no file but `/proc`.
"""

import base64
import binascii
import ctypes
import faulthandler
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from shm.codec import MessageError, decoder_for, pack, unpack
from shm.pool import PoolLayout

PR_SET_PDEATHSIG = 1
SIGNALS_OF_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAG = "ChildArguments"


@dataclass(frozen=True, slots=True)
class ChildArguments:
    """What a child is told before it can ask. Descriptors are inherited under the same numbers."""

    process: str  # "io0", "io1", …, "compute": its name in messages, logs and metrics
    endpoint: str  # ZeroMQ address that the parent has bound
    token: str  # sent back in `Hello`
    parent_pid: int  # taken in the parent: the child may be too late to ask
    cores: tuple[int, ...]  # empty: leave the affinity as it is
    pool_fd: int | None  # None: a run without pool
    layout: PoolLayout
    file_fds: tuple[int, ...]  # every descriptor of the model files, buffered and direct
    notice_fd: int | None = None  # the end of the pipe of `notices` that is this process's


@dataclass(frozen=True, slots=True)
class Birth:
    """What became of it: the cores this process may really use, and what could not be had."""

    cores: tuple[int, ...]
    warnings: tuple[str, ...]


def encode_arguments(arguments: ChildArguments) -> str:
    """The arguments as one text for the command line."""
    return base64.urlsafe_b64encode(pack(_TAG, arguments)).decode("ascii")


def decode_arguments(text: str) -> ChildArguments:
    """Undo `encode_arguments`; raises `MessageError` for anything else."""
    try:
        data = base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise MessageError("arguments: expected the text of encode_arguments") from error
    tag, fields = unpack(data)
    if tag != _TAG:
        raise MessageError(f"arguments: expected {_TAG}, found {tag!r:.40}")
    arguments: ChildArguments = decoder_for(ChildArguments)(fields)
    return arguments


def begin_life(arguments: ChildArguments) -> Birth:
    """Tie this process to its parent, set its signals, pin it. Call first, in the main thread.

    Raises `SystemExit` if the parent is gone already: there is nobody left to report to.
    """
    warnings = []
    if not die_with_parent():
        warnings.append("prctl(PR_SET_PDEATHSIG) refused: this process looks for its parent itself")
    if parent_is_gone(arguments.parent_pid):
        raise SystemExit(0)
    faulthandler.enable()
    # A page of a mapped file that the disk could not give. The parent explains it in one line and
    # ends all processes: a dump would be cut in the middle of a line.
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    # They reach all processes of a terminal's group or of a service's cgroup: the parent alone
    # decides, and sends `Stop`. It starts children with these blocked, so that none ends a child
    # that has not come this far; what came meanwhile is dropped here.
    for number in SIGNALS_OF_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_OF_THE_PARENT)
    cores, warning = _pin(arguments.cores)
    return Birth(cores, tuple(warnings) + ((warning,) if warning else ()))


def parent_is_gone(parent_pid: int) -> bool:
    """Whether another process took over this one. Asked with every heartbeat where prctl fails."""
    return os.getppid() != parent_pid


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot, None if there is no such process.

    Pids are used again; pid and start time together name a process. Field 22 of proc(5) stat,
    counted behind the last parenthesis because a name may hold spaces and parentheses.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def die_with_parent() -> bool:
    """SIGKILL when the parent ends: seen by the kernel, so no native call can delay it."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0)


def _pin(cores: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
    """Set the affinity and read it back: the kernel silently drops cores that do not exist."""
    warning = None
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except (OSError, ValueError, OverflowError) as error:
            warning = f"cores {list(cores)}: cannot be set ({error})"
    found = tuple(sorted(os.sched_getaffinity(0)))
    if cores and warning is None and found != tuple(sorted(set(cores))):
        warning = f"cores: expected {sorted(set(cores))}, found {list(found)}"
    return found, warning
