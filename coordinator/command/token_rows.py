"""`--csv FILE`: one row per generated token with where its time went.

    token            0 is the first; its row has the whole prompt
    wall_s           of the steps that led to it, as compute saw them
    compute_s        wall less the next two
    read_s           waiting for the disk
    coordination_s   waiting for the coordinator
    madvise_s        that readers spent asking the kernel for pages, all together; 0 with a pool
    major_faults     of the compute process
    bytes_read       of experts; where the page cache keeps them, of all our processes
    requests, hits   experts asked for, and those that were there; hits are empty where only the
                     kernel knows

A row is written when its token is there: a run that is killed leaves whole rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from coordinator.command.flag_values import ConfigError
from shm.messages import StepDone

COLUMNS = (
    "request", "token", "wall_s", "compute_s", "read_s", "coordination_s", "madvise_s",
    "major_faults", "bytes_read", "requests", "hits",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Totals:
    """What was counted since the start of the engine. `hits` None: nobody knows."""

    bytes_read: int
    madvise_ns: int
    requests: int
    hits: int | None


Look = Callable[[], Totals]


class TokenRows:
    """Writes rows. A disk that fails ends the file, not the run: see `failure`."""

    def __init__(self, file: TextIO) -> None:
        self.failure: OSError | None = None
        self._file = file
        self._request = 0
        self._look: Look = _nothing
        self._before = _nothing()
        self._token = 0
        self._times_ns = [0, 0, 0, 0]  # wall, compute, disk, coordination
        self._major_faults = 0
        self._standing_uses = 0
        self._put(COLUMNS)

    def begin(self, request: int, look: Look) -> None:
        """The steps of a request follow; `look` tells what was counted up to now."""
        self._request, self._token = request, 0
        self._look, self._before = look, look()
        self._times_ns, self._major_faults, self._standing_uses = [0, 0, 0, 0], 0, 0

    def add_step(self, done: StepDone) -> None:
        """One more step; those without a token count for the token that follows."""
        times = done.times
        parts = (times.wall_ns, times.compute_ns, times.wait_disk_ns, times.coordination_ns)
        self._times_ns = [sum(pair) for pair in zip(self._times_ns, parts, strict=True)]
        self._major_faults += times.major_faults
        self._standing_uses += done.standing_uses
        if done.sampled:
            self._put(self._row(self._look()))
            self._token += 1
            self._times_ns, self._major_faults, self._standing_uses = [0, 0, 0, 0], 0, 0

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            self.failure = self.failure or error

    def _row(self, now: Totals) -> tuple[str, ...]:
        before, self._before = self._before, now
        hits = ""  # standing grants are hits that no `Need` told of
        if now.hits is not None and before.hits is not None:
            hits = str(now.hits - before.hits + self._standing_uses)
        return (
            str(self._request),
            str(self._token),
            *[f"{ns / 1e9:.6f}" for ns in self._times_ns],
            f"{(now.madvise_ns - before.madvise_ns) / 1e9:.6f}",
            str(self._major_faults),
            str(now.bytes_read - before.bytes_read),
            str(now.requests - before.requests + self._standing_uses),
            hits,
        )

    def _put(self, values: Sequence[str]) -> None:
        if self.failure is None:
            try:
                self._file.write(",".join(values) + "\n")
            except OSError as error:
                self.failure = error


def create_rows(path: Path) -> TokenRows:
    """Rows in a new file, or over an old one. Raises `ConfigError`."""
    try:
        return TokenRows(path.open("w", buffering=1, encoding="ascii", newline="\n"))
    except OSError as error:
        raise ConfigError(
            f"--csv: expected a path that can be written, found {str(path)!a:.200}: "
            f"{error.strerror}; give another path"
        ) from error


def _nothing() -> Totals:
    return Totals(0, 0, 0, 0)
