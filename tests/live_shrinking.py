"""Live shrinking seen from outside: ``python tests/live_shrinking.py MODEL --cap 2000 …`` (root).

A service answers the same request again and again inside a control group, while another program in
the group takes memory and ends. Says how far the pool shrank, how long after that end it was whole
again, whether anything was killed, and whether every answer is the first one. Ends with 1 if not.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memory_samples import INTERVAL_SECONDS, Sample, take_sample
from running_service import RunningService

from coordinator.bench.cgroup import open_group
from coordinator.processes.group import Group, Limits

MiB = 1 << 20
BEFORE_SECONDS, HOLD_SECONDS = 3.0, 3.0  # of calm before the other program comes, and with it
LONGEST_SECONDS = 120.0
PROMPT = [5, 777, 30011, 421, 9000, 1234, 40404, 17]
OTHER_PROGRAM = """
import sys, time
n_pieces, seconds_each = int(sys.argv[1]), float(sys.argv[2])
taken = []
for _ in range(n_pieces):
    taken.append(b"x" * (4 << 20))
    time.sleep(seconds_each)
time.sleep(float(sys.argv[3]))
"""
PIECE_MIB = 4


@dataclass(frozen=True, slots=True)
class Taking:
    """What the other program does: MiB in all, and MiB per second."""

    mib: int
    mib_per_second: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was seen. Bytes of the pool are those that are allocated."""

    whole_pool_bytes: int
    least_pool_bytes: int
    restored_seconds: float | None  # after the other program's end; None: not in time
    peak_accounted_bytes: int
    n_answers: int
    n_different: int  # answers that are not the first one
    oom_kills: int | None
    limit_hits: int | None  # after the start
    n_deaths: int  # of processes of the service
    other_exit_code: int


@dataclass(slots=True)
class Asking:
    """Asks the same in a thread until it is told to stop."""

    service: RunningService
    n_tokens: int
    answers: list[Any] = field(default_factory=list)
    error: Exception | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, with one answer before anything happens."""
        self._ask()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the last answer; raises what a request raised."""
        self._is_over.set()
        assert self._thread is not None
        self._thread.join(LONGEST_SECONDS)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._ask()
        except (OSError, AssertionError, ValueError) as error:  # told by `stop`
            self.error = error

    def _ask(self) -> None:
        parameters = {"max_tokens": self.n_tokens, "seed": 1, "temperature": 1}
        body = self.service.complete(PROMPT, **parameters)
        self.answers.append(body["choices"][0]["text"])


def press(
    model: Path, cap_bytes: int, flags: Sequence[str], taking: Taking, n_tokens: int
) -> Outcome:
    """One whole measurement. Raises `ResourceError` where no group can be made."""
    group = open_group(f"moe-coord-shrinking-{os.getpid()}", Limits(cap_bytes))
    entrances = group.entrances()

    def join() -> None:
        for entrance in entrances:
            entrance.write_text("0")

    with contextlib.closing(group):
        arguments = ("--model", str(model), *flags)
        with RunningService(*arguments, stdout=subprocess.DEVNULL, preexec_fn=join) as service:
            service.wait_ready()
            return _pressed(service, group, taking, n_tokens)


def _pressed(service: RunningService, group: Group, taking: Taking, n_tokens: int) -> Outcome:
    hits_before = group.memory().limit_hits
    samples: list[Sample] = []
    asking = Asking(service, n_tokens)
    asking.start()
    _watch(service, samples, lambda: False, BEFORE_SECONDS)
    whole_bytes = samples[-1].pool_bytes
    other = _other_program(group, taking)
    _watch(service, samples, lambda: other.poll() is not None, LONGEST_SECONDS)
    other_exit_code = other.wait(LONGEST_SECONDS)
    ended = time.monotonic()
    is_whole = _watch(
        service, samples, lambda: samples[-1].pool_bytes == whole_bytes, LONGEST_SECONDS
    )
    restored_seconds = time.monotonic() - ended
    asking.stop()
    memory = group.memory()
    return Outcome(
        whole_pool_bytes=whole_bytes,
        least_pool_bytes=min(sample.pool_bytes for sample in samples),
        restored_seconds=restored_seconds if is_whole else None,
        peak_accounted_bytes=max(sample.accounted_bytes for sample in samples),
        n_answers=len(asking.answers),
        n_different=sum(answer != asking.answers[0] for answer in asking.answers),
        oom_kills=memory.oom_kills,
        limit_hits=(memory.limit_hits or 0) - (hits_before or 0),
        n_deaths=service.errors().count("event=died"),
        other_exit_code=other_exit_code,
    )


def _watch(service: RunningService, samples: list[Sample], is_over: Any, seconds: float) -> bool:
    """Sample until it is over; False after so many seconds."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        samples.append(take_sample(service.process.pid, started))
        if is_over():
            return True
        time.sleep(INTERVAL_SECONDS)
    return False


def _other_program(group: Group, taking: Taking) -> "subprocess.Popen[bytes]":
    entrances = " ".join(map(str, group.entrances()))
    return subprocess.Popen(
        [
            "sh", "-c", f'for f in {entrances}; do echo $$ > $f; done; exec "$@"', "sh",
            sys.executable, "-c", OTHER_PROGRAM, str(taking.mib // PIECE_MIB),
            str(PIECE_MIB / taking.mib_per_second), str(HOLD_SECONDS),
        ],
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--cap", type=int, default=2000, metavar="MIB")
    parser.add_argument("--memory", type=int, default=1900, metavar="MIB")
    parser.add_argument("--take", type=int, default=400, metavar="MIB")
    parser.add_argument("--rate", type=float, default=200.0, metavar="MIB_PER_SECOND")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="of each answer")
    options = parser.parse_args()
    flags = ("--memory", f"{options.memory}M", "--context", "512", "--parallel", "1")
    taking = Taking(options.take, options.rate)
    found = press(options.model, options.cap * MiB, flags, taking, options.tokens)
    print(json.dumps(asdict(found)))
    is_good = not (found.n_different or found.oom_kills or found.n_deaths or found.other_exit_code)
    return 0 if is_good and found.restored_seconds is not None else 1


if __name__ == "__main__":
    sys.exit(main())
