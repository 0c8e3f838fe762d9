"""A run without processes of its own for tests of the metrics, and pages read back."""

import os
from dataclasses import dataclass, field

import simulation
from prometheus_client.parser import text_string_to_metric_families

from coordinator.metrics.http_totals import HttpTotals
from coordinator.metrics.scrape import Life, RunView
from coordinator.plan.budget import MemoryPlan
from coordinator.processes.totals import Totals
from shm.pool import PoolLayout

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]  # name, labels -> value

PLAN = MemoryPlan(
    budget_bytes=1000,
    source="--memory",
    processes_bytes=100,
    page_table_bytes=10,
    dense_bytes=200,
    maps_dense=False,
    kv_bytes=30,
    scratch_bytes=40,
    pool_limit_bytes=600,
    pool_bytes=500,
    context_tokens=512,
    n_sequences=1,
    n_kv_blocks=1,
    chunk_tokens=64,
    layout=PoolLayout(()),
    class_of_layer=(),
    n_experts=32,
    n_active=2,
    token_cycle_bytes=100,
)


@dataclass
class ScrapedRun:
    """What the loop would own. Workers that are up have a life: here mostly that of the test."""

    engine: simulation.Engine
    totals: Totals
    lives: dict[str, Life | None]
    restarts: dict[str, int] = field(default_factory=dict)
    accounted: tuple[int, int] = (700, 800)
    kernels: str | None = "numpy"
    http: HttpTotals | None = None

    @property
    def view(self) -> RunView:
        """What a scrape reads."""
        return RunView(
            core=self.engine.core,
            totals=self.totals,
            plan=PLAN,
            version="1.2.3",
            reader="direct",
            policy="lru",
            workers=tuple(self.lives),
            kernels=lambda: self.kernels,
            life_of=lambda name: self.lives[name],
            n_restarts=lambda name: self.restarts.get(name, 0),
            accounted_bytes=lambda: self.accounted,
            http=self.http,
        )


def scraped_run(
    workers: tuple[str, ...] = ("io0", "io1", "compute"),
    *,
    n_layers: int = 4,
    n_experts: int = 8,
    n_slots: int = 9,
) -> ScrapedRun:
    """A run that did nothing yet; all workers are up."""
    return ScrapedRun(
        simulation.engine(n_layers, n_experts, n_slots),
        Totals(name for name in workers if name != "compute"),
        dict.fromkeys(workers, Life(os.getpid(), 1)),
    )


def figures(page: bytes) -> Figures:
    """All samples of a page."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def figure(page: bytes, name: str, **labels: str) -> float:
    """One sample of a page."""
    return figures(page)[name, frozenset(labels.items())]
