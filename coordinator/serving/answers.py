"""Requests of the HTTP process while they run: whose they are, and what they took.

Pure bookkeeping: the caller brings the time and the counters of the run.
"""

from dataclasses import dataclass, field

from coordinator.core.geometry import ExpertCounters
from shm.service_messages import AnswerFigures


@dataclass(frozen=True, slots=True)
class ExpertTotals:
    """Of a run, at one moment. `hits` is None where the page cache does not tell."""

    requests: int
    hits: int | None
    bytes_read: int


def expert_totals(
    counters: ExpertCounters, standing_uses: int, *, knows_hits: bool
) -> ExpertTotals:
    """The counters of the core together with the hits that no `Need` told of."""
    return ExpertTotals(
        counters.requests + standing_uses,
        counters.hits + standing_uses if knows_hits else None,
        counters.bytes_read,
    )


@dataclass(slots=True)
class RunningAnswer:
    """One request. `number` is what the HTTP process calls it; times are None until they come."""

    number: int
    n_prompt: int
    submitted_ns: int
    began_ns: int | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    n_tokens: int = 0
    n_cached: int = 0
    before: ExpertTotals = field(default_factory=lambda: ExpertTotals(0, None, 0))

    def begin(self, now_ns: int, totals: ExpertTotals, n_cached: int) -> None:
        """It left the queue."""
        self.began_ns, self.before, self.n_cached = now_ns, totals, n_cached

    def add_token(self, now_ns: int) -> None:
        """One more token was drawn."""
        self.n_tokens += 1
        self.last_ns = now_ns
        if self.first_ns is None:
            self.first_ns = now_ns

    def figures(self, now_ns: int, totals: ExpertTotals) -> AnswerFigures:
        """What it took, now that it is over."""
        began_ns = self.began_ns if self.began_ns is not None else now_ns
        first_ns = self.first_ns if self.first_ns is not None else now_ns
        last_ns = self.last_ns if self.last_ns is not None else now_ns
        before = self.before if self.began_ns is not None else totals
        hits = None
        if totals.hits is not None and before.hits is not None:
            hits = totals.hits - before.hits
        return AnswerFigures(
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_tokens=self.n_tokens,
            queued_ns=began_ns - self.submitted_ns,
            prompt_ns=max(0, first_ns - began_ns),
            decode_ns=max(0, last_ns - first_ns),
            expert_requests=totals.requests - before.requests,
            expert_hits=hits,
            bytes_read=totals.bytes_read - before.bytes_read,
        )
