"""How one metric is declared; which there are stands in `series`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from coordinator.metrics.scrape import Scrape
from coordinator.processes.totals import Histogram

PREFIX = "moe_coord_"

Whose = Literal["coordinator", "compute", "readers", "http", "all"]
Value = float | Histogram
Sample = tuple[tuple[str, ...], Value]  # values of the labels, in their order; value


@dataclass(frozen=True, slots=True)
class Series:
    """One metric. `name` is without the prefix and, for a counter, without `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    whose: Whose
    help: str
    labels: tuple[str, ...]
    read: Callable[[Scrape], Iterable[Sample]]

    @property
    def full_name(self) -> str:
        """As Prometheus shows it."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    def is_of(self, scrape: Scrape) -> bool:
        """Whether the process of a scrape shows it."""
        match self.whose:
            case "readers":
                return scrape.process in scrape.run.totals.readers
            case "all":
                return scrape.use is not None
            case "http":
                return scrape.process == "http" and scrape.run.http is not None
        return scrape.process == self.whose


def one(read: Callable[[Scrape], Value]) -> Callable[[Scrape], Iterable[Sample]]:
    """A series without labels."""
    return lambda scrape: [((), read(scrape))]


def by_name(read: Callable[[Scrape], Mapping[str, Value]]) -> Callable[[Scrape], Iterable[Sample]]:
    """A series with one label."""
    return lambda scrape: [((name,), value) for name, value in read(scrape).items()]
