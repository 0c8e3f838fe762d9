"""Renders what Prometheus scrapes: one page per process, and one of all of them for people.

Reads plain state when it is scraped, asks the kernel about the processes, and keeps every page for
`KEEP_SECONDS`, so that many scrapers cost no more than one. Belongs to the thread that serves (see
`server`); the loop never comes here. The only module that imports prometheus_client and
psutil.

Rule to keep: no counter ever falls, whatever happens to a process.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from coordinator.command.line import version
from coordinator.metrics.http_totals import HttpTotals
from coordinator.metrics.one_series import PREFIX, Sample, Series
from coordinator.metrics.scrape import COORDINATOR, Life, ProcessUse, RunView, Scrape, Used
from coordinator.metrics.series import SERIES
from coordinator.plan.setup import Setup
from coordinator.processes.engine import COMPUTE, Engine
from coordinator.processes.totals import Histogram

KEEP_SECONDS = 0.25
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of the pages


def run_view(engine: Engine, setup: Setup, http: HttpTotals | None = None) -> RunView:
    """What scrapes of a run read."""

    def life_of(name: str) -> Life | None:
        child = engine.children.get(name)
        if child is None or not child.is_ready:
            return None
        return Life(child.process.pid, child.started_ns)

    def kernels() -> str | None:
        child = engine.children.get(COMPUTE)
        found = child.detail.get("kernels") if child is not None else None
        return str(found) if found is not None else None

    return RunView(
        core=engine.core,
        totals=engine.totals,
        plan=setup.plan,
        version=version(),
        reader=setup.reader.name,
        policy=setup.config.policy,
        workers=engine.names,
        kernels=kernels,
        life_of=life_of,
        n_restarts=lambda name: engine.restarts.counts[name],
        accounted_bytes=lambda: (engine.memory.accounted_bytes, engine.memory.peak_bytes),
        http=http,
    )


def measure(pid: int) -> ProcessUse | None:
    """What the kernel counts of a living process; None for one that is dead or gone.

    psutil does not know page faults and locked memory: `stat` and `status` of proc(5).
    """
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            times, switches = process.cpu_times(), process.num_ctx_switches()
            resident_bytes = process.memory_info().rss
        # the second field is a name in parentheses and may hold anything
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text()
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None
    locked = status.partition("VmLck:")[2].split(maxsplit=1)
    return ProcessUse(
        resident_bytes,
        int(locked[0]) * 1024 if locked else 0,
        Used(
            times.user,
            times.system,
            major_faults=int(stat[9]),
            minor_faults=int(stat[7]),
            voluntary_switches=switches.voluntary,
            involuntary_switches=switches.involuntary,
        ),
    )


@dataclass(slots=True)
class _Lives:
    """Of one process name: the present life, what it used, and what all before it used."""

    life: Life
    used: Used
    before: Used


class UseTotals:
    """What processes use, over all their lives.

    What one used between the last look at it and its death is not counted.
    """

    def __init__(self) -> None:
        self._lives: dict[str, _Lives] = {}

    def of(self, name: str, life: Life) -> ProcessUse | None:
        """Look at a process now; None if it is dead."""
        use = measure(life.pid)
        if use is None:
            return None
        known = self._lives.get(name)
        if known is None:
            known = self._lives[name] = _Lives(life, use.used, Used())
        elif known.life != life:
            known.life, known.before = life, known.before.plus(known.used)
        known.used = use.used
        return ProcessUse(use.resident_bytes, use.locked_bytes, known.before.plus(use.used))


class Exposition:
    """The pages of a run. For one thread."""

    def __init__(self, run: RunView, now: Callable[[], float] = time.monotonic) -> None:
        self.processes = (COORDINATOR, *run.workers)
        self._run = run
        self._now = now
        self._uses = UseTotals()
        self._kept: dict[str, tuple[float, bytes | None]] = {}

    def page(self, process: str) -> bytes | None:
        """The series of one process; None while it is down."""
        return self._keep(process, lambda: self._render_one(process))

    def page_of_all(self) -> bytes:
        """All series, with a label `process`. A process that is down shows what was counted."""
        page = self._keep("", lambda: _render([self._scrape(p) for p in self.processes], all=True))
        assert page is not None
        return page

    def _keep(self, name: str, render: Callable[[], bytes | None]) -> bytes | None:
        now = self._now()
        since, page = self._kept.get(name, (-KEEP_SECONDS, None))
        if now - since >= KEEP_SECONDS:
            page = render()
            self._kept[name] = (now, page)
        return page

    def _render_one(self, process: str) -> bytes | None:
        scrape = self._scrape(process)
        return None if scrape.use is None else _render([scrape], all=False)

    def _scrape(self, process: str) -> Scrape:
        if process == COORDINATOR:
            life: Life | None = Life(os.getpid(), 0)
        else:
            life = self._run.life_of(process)
        return Scrape(self._run, process, None if life is None else self._uses.of(process, life))


class _Page(Collector):
    """The families of one page, as the library wants to collect them."""

    def __init__(self, scrapes: Sequence[Scrape], *, all: bool) -> None:
        self._scrapes = scrapes
        self._all = all

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        for series in SERIES:
            shown = [scrape for scrape in self._scrapes if series.is_of(scrape)]
            samples = [
                ((scrape.process, *labels) if self._all else labels, value)
                for scrape in shown
                for labels, value in series.read(scrape)
            ]
            if samples:
                yield family(series, ("process",) if self._all else (), samples)


def _render(scrapes: Sequence[Scrape], *, all: bool) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Page(scrapes, all=all))
    return generate_latest(registry)


def family(series: Series, more_labels: tuple[str, ...], samples: Sequence[Sample]) -> Metric:
    """One series as the library knows it."""
    name, labels = PREFIX + series.name, (*more_labels, *series.labels)
    match series.kind:
        case "histogram":
            histogram = HistogramMetricFamily(name, series.help, labels=labels)
            for values, value in samples:
                assert isinstance(value, Histogram)
                histogram.add_metric(values, _buckets(value), sum_value=value.sum_ns / 1e9)
            return histogram
        case "counter":
            simple: CounterMetricFamily | GaugeMetricFamily
            simple = CounterMetricFamily(name, series.help, labels=labels)
        case "gauge":
            simple = GaugeMetricFamily(name, series.help, labels=labels)
    for values, value in samples:
        assert not isinstance(value, Histogram)
        simple.add_metric(values, value)
    return simple


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bounds with the number of durations up to each, as the format wants it."""
    total = 0
    buckets: list[tuple[str, float]] = []
    bounds = [*map(str, histogram.bounds_seconds), "+Inf"]
    for bound, count in zip(bounds, list(histogram.counts), strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
