"""What this process counts for Prometheus; the coordinator keeps the totals (`HttpGrowth`)."""

from collections import Counter

from coordinator.metrics.http_totals import TOKEN_BOUNDS_SECONDS
from coordinator.processes.totals import Histogram
from shm.service_messages import HistogramGrowth, HttpGrowth, RouteCount


class HttpCounts:
    """Since the last `take`."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.first_token = Histogram(TOKEN_BOUNDS_SECONDS)
        self.next_token = Histogram(TOKEN_BOUNDS_SECONDS)
        self._answers: Counter[tuple[str, int]] = Counter()
        self._told: tuple[int, int] = (0, 0)

    def answered(self, route: str, status: int) -> None:
        """A request of a route is answered. `route` is one of a fixed set."""
        self._answers[route, status] += 1

    def take(self, n_queued: int) -> HttpGrowth | None:
        """What to tell the coordinator; None if nothing has changed."""
        now = (self.in_flight, n_queued)
        first, following = _growth(self.first_token), _growth(self.next_token)
        if not self._answers and not any((*first.counts, *following.counts)) and now == self._told:
            return None
        answers = tuple(RouteCount(*key, n) for key, n in sorted(self._answers.items()))
        self._told = now
        self._answers.clear()
        self.first_token = Histogram(TOKEN_BOUNDS_SECONDS)
        self.next_token = Histogram(TOKEN_BOUNDS_SECONDS)
        return HttpGrowth(answers, *now, first, following)


def _growth(histogram: Histogram) -> HistogramGrowth:
    return HistogramGrowth(tuple(histogram.counts), histogram.sum_ns)
