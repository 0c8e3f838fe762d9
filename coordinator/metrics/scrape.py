"""What a scrape reads: plain state of the run, and what the kernel says of one process.

Only types: who fills them is `exposition`, who reads them is the table in `series`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.core.state import Core
from coordinator.metrics.http_totals import HttpTotals
from coordinator.plan.budget import MemoryPlan
from coordinator.processes.totals import ReaderTotals, Totals

COORDINATOR = "coordinator"  # the name of this process; workers have those of `ChildSpec`


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a process. A number may come again, so the start tells lives apart."""

    pid: int
    started_ns: int


@dataclass(frozen=True, slots=True)
class Used:
    """Totals of a process since its start, or over all its lives."""

    user_seconds: float = 0.0
    system_seconds: float = 0.0
    major_faults: int = 0
    minor_faults: int = 0
    voluntary_switches: int = 0
    involuntary_switches: int = 0

    def plus(self, other: "Used") -> "Used":
        """Both together."""
        return Used(
            self.user_seconds + other.user_seconds,
            self.system_seconds + other.system_seconds,
            self.major_faults + other.major_faults,
            self.minor_faults + other.minor_faults,
            self.voluntary_switches + other.voluntary_switches,
            self.involuntary_switches + other.involuntary_switches,
        )


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What the kernel counts of one process: memory now, and totals."""

    resident_bytes: int
    locked_bytes: int
    used: Used


@dataclass(frozen=True, slots=True)
class RunView:
    """What a scrape reads of a run. The callables return at once, from any thread."""

    core: Core
    totals: Totals
    plan: MemoryPlan
    version: str
    reader: str
    policy: str
    workers: tuple[str, ...]  # all processes but the coordinator
    kernels: Callable[[], str | None]  # None: compute has not said it yet
    life_of: Callable[[str], Life | None]  # of a worker; None: it is down, or starts
    n_restarts: Callable[[str], int]
    accounted_bytes: Callable[[], tuple[int, int]]  # last measured, and the highest
    http: HttpTotals | None = None  # of the service


@dataclass(frozen=True, slots=True)
class Scrape:
    """One process at the moment of a scrape. `use` is None while it is down."""

    run: RunView
    process: str
    use: ProcessUse | None

    @property
    def http(self) -> HttpTotals:
        """What the service's HTTP process counts."""
        assert self.run.http is not None
        return self.run.http

    @property
    def reader(self) -> ReaderTotals:
        """Its reads."""
        return self.run.totals.readers[self.process]
