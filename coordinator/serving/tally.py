"""Adds up what a run did: tokens, times, experts. Knows no output format but its own record."""

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from coordinator.core.geometry import ExpertCounters
from coordinator.core.page_cache_residency import PageCacheResidency
from coordinator.core.residency import Residency
from coordinator.core.slots import SlotState
from coordinator.plan.setup import Setup
from coordinator.processes.disk_use import DiskUse
from shm.messages import StepDone

MiB = 1024 * 1024
N_FIRST_STEPS = 8  # decode steps whose hits tell what the prompt left in the pool
TOKENS_PER_SPEED = 100  # speed is told per so many tokens of a long answer


@dataclass(slots=True)
class Tally:
    """Of one request. Times in seconds on the monotonic clock."""

    n_prompt: int
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    n_tokens: int = 0
    n_decode_steps: int = 0
    compute_ns: int = 0  # of decode steps
    experts_ns: int = 0  # of them, in the kernels of the experts
    wait_disk_ns: int = 0
    coordination_ns: int = 0
    major_faults: int = 0
    minor_faults: int = 0
    standing_uses: int = 0
    first_requests: int = 0  # of the first decode steps
    first_hits: int = 0
    token_seconds: list[float] = field(default_factory=list)  # of each token; [0] has the prompt
    speeds: list[float] = field(default_factory=list)  # tokens/s of each 100 tokens
    _mark: float = 0.0
    _requests: int = 0  # at the last step
    _hits: int = 0

    def add_token(self) -> None:
        """One more token of the answer is there."""
        now = time.monotonic()
        if self.first_token is None:
            self.first_token = self._mark = now
        self.token_seconds.append(now - (self.last_token or self.started))
        self.last_token = now
        self.n_tokens += 1
        if self.n_tokens % TOKENS_PER_SPEED == 1 and self.n_tokens > 1:
            self.speeds.append(round(TOKENS_PER_SPEED / max(1e-9, now - self._mark), 2))
            self._mark = now

    def add_step(self, done: StepDone, counters: ExpertCounters) -> None:
        """One more step; steps after the first token are decode steps. `counters` are totals."""
        self.standing_uses += done.standing_uses
        requests = counters.requests + self.standing_uses
        hits = counters.hits + self.standing_uses
        n_requests, n_hits = requests - self._requests, hits - self._hits
        self._requests, self._hits = requests, hits
        if self.n_tokens <= 1:
            return
        times = done.times
        self.n_decode_steps += 1
        if self.n_decode_steps <= N_FIRST_STEPS:
            self.first_requests += n_requests
            self.first_hits += n_hits
        self.compute_ns += times.compute_ns
        self.experts_ns += times.experts_ns
        self.wait_disk_ns += times.wait_disk_ns
        self.coordination_ns += times.coordination_ns
        self.major_faults += times.major_faults
        self.minor_faults += times.minor_faults

    @property
    def prompt_seconds(self) -> float:
        """From the request to its first token."""
        return (self.first_token or time.monotonic()) - self.started

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        if self.first_token is None or self.last_token is None:
            return 0.0
        return self.last_token - self.first_token

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first ÷ their time; 0 with fewer than two."""
        if self.n_tokens < 2 or self.decode_seconds <= 0:
            return 0.0
        return (self.n_tokens - 1) / self.decode_seconds

    def per_token(self, total_ns: int) -> float:
        """A total of decode steps as seconds per token."""
        return total_ns / 1e9 / max(1, self.n_decode_steps)


def record(
    tally: Tally,
    residency: Residency | PageCacheResidency,
    setup: Setup,
    peak_bytes: int,
    disk_use: DiskUse,
) -> dict[str, Any]:
    """The measured half of the JSON of a run."""
    prefetch = residency.prefetch
    return {
        "timings": {
            "first_token_s": round(tally.prompt_seconds, 6),
            "prompt_s": round(tally.prompt_seconds, 6),
            "decode_s": round(tally.decode_seconds, 6),
            "decode_tok_s": round(tally.decode_tokens_per_second, 4),
            "compute_s": round(tally.per_token(tally.compute_ns), 6),
            "experts_s": round(tally.per_token(tally.experts_ns), 6),
            "wait_disk_s": round(tally.per_token(tally.wait_disk_ns), 6),
            "coordination_s": round(tally.per_token(tally.coordination_ns), 6),
            "tok_s_per_100_tokens": tally.speeds,
            "started_monotonic_s": round(tally.started, 6),
            "token_s": [round(seconds, 6) for seconds in tally.token_seconds],
        },
        "experts": _experts(tally, residency, disk_use),
        "prefetch": {
            "phase": prefetch.phase.value,
            **dataclasses.asdict(prefetch.counters),
        },
        "memory": {
            "budget_bytes": setup.plan.budget_bytes,
            "pool_bytes": setup.plan.pool_bytes,
            "dense_bytes": setup.plan.dense_bytes,
            "kv_bytes": setup.plan.kv_bytes,
            "total_peak_bytes": peak_bytes,
            "experts_in_own_memory": residency.slots.count(SlotState.ADOPTED),
            "pool_shrinks": residency.resized.shrinks,
            "pool_grows": residency.resized.grows,
        },
        "faults": {
            "major": round(tally.major_faults / max(1, tally.n_decode_steps), 3),
            "minor": round(tally.minor_faults / max(1, tally.n_decode_steps), 3),
            "of_all_processes": {"major": disk_use.major_faults, "minor": disk_use.minor_faults},
        },
    }


def _experts(
    tally: Tally, residency: Residency | PageCacheResidency, disk_use: DiskUse
) -> dict[str, int | float | None]:
    """Where the page cache is the only cache, the kernel knows hits and misses and we do not."""
    counters = residency.counters
    requests = counters.requests + tally.standing_uses
    if not residency.knows_hits:
        names = ("hits", "misses", "bytes_over_read", "evictions", "first_8_decode_hit_rate")
        return {
            "requests": requests,
            **dict.fromkeys(names),
            "bytes_read": disk_use.bytes_read,
            "read_s": round(counters.read_ns / 1e9, 6),
        }
    return {
        "requests": requests,
        "hits": counters.hits + tally.standing_uses,
        "misses": counters.misses,
        "bytes_read": counters.bytes_read,
        "bytes_over_read": counters.bytes_over_read,
        "read_s": round(counters.read_ns / 1e9, 6),  # of all reads, also side by side
        "reading_s": round(counters.reading.total_ns / 1e9, 6),  # at least one was under way
        "evictions": counters.evictions,
        "first_8_decode_hit_rate": round(tally.first_hits / max(1, tally.first_requests), 6),
    }


def summary(tally: Tally, residency: Residency | PageCacheResidency, disk_use: DiskUse) -> str:
    """The one line at the end of a run."""
    experts = _experts(tally, residency, disk_use)
    n_all = tally.n_prompt + tally.n_tokens
    cache = f"{tally.major_faults / max(1, tally.n_decode_steps):.1f} major page faults per token"
    if experts["hits"] is not None:
        share = 100 * experts["hits"] / max(1, experts["requests"] or 0)
        cache = f"hit rate {share:.1f} % ({experts['misses']} misses)"
    parts = [
        f"{tally.n_tokens} tokens",
        f"{tally.decode_tokens_per_second:.1f} tokens/s",
        f"first token after {tally.prompt_seconds:.2f} s",
        cache,
        f"{(experts['bytes_read'] or 0) / MiB / max(1, n_all):.2f} MiB read per token",
        f"per token {1e3 * tally.per_token(tally.compute_ns):.1f} ms compute, "
        f"{1e3 * tally.per_token(tally.wait_disk_ns):.1f} ms disk, "
        f"{1e3 * tally.per_token(tally.coordination_ns):.2f} ms coordination",
    ]
    return "; ".join(parts)
