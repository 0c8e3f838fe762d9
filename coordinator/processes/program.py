"""Runs one program inside a group and watches it from outside: output, bytes read, end.

The program is a clean exec that joins its group before it becomes the program, so not one of its
pages is charged elsewhere. Looking costs one small file every `SAMPLE_SECONDS`. Signals are noted,
never raised: whoever changed something of the machine gets to put it back. Who is killed cannot,
but a program that it watched ends with it.
"""

import contextlib
import math
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.command.signals import StopSignals
from coordinator.processes.group import Group, read_text
from shm.birth import die_with_parent

SAMPLE_SECONDS = 0.05
TERMINATE_SECONDS = 5.0  # for a clean end before the program is killed
LAST_WORDS_SECONDS = 1.0  # for what is in its pipes when it has ended
MAX_OUTPUT_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class Watched:
    """What was seen of a program. Times in seconds on the monotonic clock, which all share."""

    exit_code: int = -1  # negative: ended by that signal
    started: float = 0.0
    ended: float = 0.0
    is_timed_out: bool = False
    others_cores: float = 0.0  # how many cores all else on the machine kept busy meanwhile
    major_faults: int = 0  # of it and of all children that it waited for
    minor_faults: int = 0
    output: bytes = b""
    error_lines: list[tuple[float, str]] = field(default_factory=list)
    read_bytes: list[tuple[float, int]] = field(default_factory=list)  # since the start

    def bytes_between(self, start: float, stop: float) -> int:
        """Bytes read in a span of time, between looks in proportion to the time."""
        return round(_at(self.read_bytes, stop) - _at(self.read_bytes, start))


def run_watched(
    command: Sequence[str],
    group: Group,
    stop: StopSignals,
    timeout_seconds: float,
    niceness: int | None = None,
) -> Watched:
    """Run it to its end, a signal, or the timeout. Raises `OSError` if it cannot be started."""
    seen = Watched(started=time.monotonic())
    cpu_before = _others_seconds()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with _started(command, group, subprocess.PIPE, own_session=True) as program:
        if niceness is not None:
            _prioritise(program.pid, niceness)
        group.watch(program.pid)
        _watch(program, group, seen, stop, seen.started + timeout_seconds)
        seen.exit_code = program.wait()
        seen.ended = time.monotonic()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seen.major_faults = after.ru_majflt - before.ru_majflt
        seen.minor_faults = after.ru_minflt - before.ru_minflt
        wall = max(1e-9, seen.ended - seen.started)
        seen.others_cores = max(0.0, _others_seconds() - cpu_before) / wall
        seen.read_bytes.append((seen.ended, group.read_bytes()))
    return seen


def run_attached(command: Sequence[str], group: Group, stop: StopSignals) -> int:
    """Run it on our own terminal; returns its exit code, 128 + N for a signal N.

    It stays in our session, so Ctrl-C reaches it without us; noted signals are handed on.
    """
    with _started(command, group, None, own_session=False) as program:
        group.watch(program.pid)
        while True:
            try:
                code = program.wait(SAMPLE_SECONDS)
            except subprocess.TimeoutExpired:
                if stop.received is not None:
                    _end(program, program.send_signal, stop.received)
                continue
            return code if code >= 0 else 128 - code


def first_line_of(command: Sequence[str]) -> str | None:
    """First line that a short command prints, None if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0] or None


@contextlib.contextmanager
def _started(
    command: Sequence[str], group: Group, output: int | None, *, own_session: bool
) -> Iterator["subprocess.Popen[bytes]"]:
    entrances = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in group.entrances()]

    def join() -> None:  # runs in the child, between fork and exec: system calls only
        if own_session:  # what is measured must not go on beside what is measured next
            die_with_parent()
        for fd in entrances:
            os.write(fd, b"0")

    try:
        program = subprocess.Popen(
            command,
            stdin=None if output is None else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=own_session,
            preexec_fn=join,
        )
    except subprocess.SubprocessError as error:  # `join` failed: Popen says no more than that
        raise OSError(0, "cannot join its control group", command[0]) from error
    finally:
        for fd in entrances:
            os.close(fd)
    with program:
        try:
            yield program
        finally:
            if program.poll() is None:
                program.kill()


def _watch(
    program: "subprocess.Popen[bytes]",
    group: Group,
    seen: Watched,
    stop: StopSignals,
    deadline: float,
) -> None:
    """Until both pipes are closed and it has ended, or soon after its end: what it started may
    outlive it and hold them."""
    assert program.stdout is not None and program.stderr is not None
    pieces: list[bytes] = []
    takers: dict[int, Callable[[bytes], None]] = {
        program.stdout.fileno(): pieces.append,
        program.stderr.fileno(): _line_taker(seen.error_lines),
    }
    next_look, last_words = 0.0, math.inf
    with selectors.DefaultSelector() as selector, _its_end(program) as pidfd:
        for fd in (*takers, pidfd):
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and (now := time.monotonic()) < last_words:
            if now >= next_look:
                seen.read_bytes.append((now, group.read_bytes()))
                next_look = now + SAMPLE_SECONDS
            for key, _ in selector.select(max(0.0, next_look - time.monotonic())):
                if key.fd == pidfd:
                    selector.unregister(pidfd)
                    last_words = time.monotonic() + LAST_WORDS_SECONDS
                    continue
                data = os.read(key.fd, 65536)
                takers[key.fd](data)
                if not data:
                    selector.unregister(key.fd)
            if stop.received is not None or now > deadline:
                seen.is_timed_out = stop.received is None
                _end(program, lambda number: os.killpg(program.pid, number), signal.SIGTERM)
                break
    seen.output = b"".join(pieces)[:MAX_OUTPUT_BYTES]


@contextlib.contextmanager
def _its_end(program: "subprocess.Popen[bytes]") -> Iterator[int]:
    """A descriptor that is readable when the program has ended."""
    pidfd = os.pidfd_open(program.pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _prioritise(pid: int, niceness: int) -> None:
    """Give a new program, alone in its session, more or less of the processor than others.

    Where sessions share it first (autogroup), the session's weight counts. Raises `OSError`.
    """
    os.setpriority(os.PRIO_PROCESS, pid, niceness)
    session = Path(f"/proc/{pid}/autogroup")
    if session.exists():
        session.write_text(str(niceness))


def _others_seconds() -> float:
    """Processor seconds so far of all but this process and its children, stolen time included.

    The fields of `cpu` in /proc/stat: user nice system idle iowait irq softirq steal.
    """
    ticks = [int(text) for text in read_text(Path("/proc/stat")).split()[1:9]]
    if len(ticks) < 8:
        return 0.0
    busy = sum(ticks) - ticks[3] - ticks[4]
    ours = sum(os.times()[:4])
    return busy / os.sysconf("SC_CLK_TCK") - ours


def _line_taker(lines: list[tuple[float, str]]) -> Callable[[bytes], None]:
    """Cuts what comes into lines, each with the time of its first byte's arrival."""
    rest = b""

    def take(data: bytes) -> None:
        nonlocal rest
        *whole, rest = (rest + data).split(b"\n")
        if not data and rest:
            whole, rest = [rest], b""
        now = time.monotonic()
        lines.extend((now, line.decode(errors="replace")) for line in whole)

    return take


def _end(program: "subprocess.Popen[bytes]", send: Callable[[int], None], number: int) -> None:
    """Ask it to end, and kill it if it does not. The group's end takes care of its children."""
    with contextlib.suppress(ProcessLookupError):
        send(number)
    try:
        program.wait(TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            send(signal.SIGKILL)


def _at(samples: Sequence[tuple[float, int]], moment: float) -> float:
    """The value at a moment, on straight lines between the samples."""
    before = (samples[0][0], 0) if samples else (0.0, 0)
    for sample in samples:
        if sample[0] >= moment:
            span = sample[0] - before[0]
            share = (moment - before[0]) / span if span > 0 else 1.0
            return before[1] + (sample[1] - before[1]) * max(0.0, share)
        before = sample
    return before[1]
