"""What the HTTP process counts, over all its lives: it reports growth, the totals are kept here.

The loop is the only writer; the thread that serves metrics reads (see `totals`).
"""

from coordinator.processes.totals import Histogram
from shm.service_messages import HistogramGrowth, HttpGrowth

# from a token of a model in memory to a long prompt on a slow disk
TOKEN_BOUNDS_SECONDS = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip


class HttpTotals:
    """Of the service."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, int], int] = {}  # by route and status
        self.in_flight = 0
        self.n_queued = 0
        self.first_token = Histogram(TOKEN_BOUNDS_SECONDS)
        self.next_token = Histogram(TOKEN_BOUNDS_SECONDS)

    def grow(self, growth: HttpGrowth) -> None:
        """Take in what was counted since the last time."""
        for count in growth.answers:
            key = (count.route, count.status)
            # a new dict: the other thread may be walking over this one
            self.answers = {**self.answers, key: self.answers.get(key, 0) + count.n}
        self.in_flight, self.n_queued = growth.in_flight, growth.n_queued
        _grow(self.first_token, growth.first_token)
        _grow(self.next_token, growth.next_token)

    def died(self) -> None:
        """The process is gone, and with it what it was doing."""
        self.in_flight = self.n_queued = 0


def _grow(histogram: Histogram, growth: HistogramGrowth) -> None:
    for place, n in enumerate(growth.counts[: len(histogram.counts)]):
        histogram.counts[place] += n
    histogram.sum_ns += growth.sum_ns
