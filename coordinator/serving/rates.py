"""What a run did in the last seconds, from totals noted now and then. Pure: the time is brought."""

from collections import deque
from dataclasses import dataclass
from typing import Any

WINDOW_NS = 10_000_000_000
NOTE_NS = 500_000_000  # how often totals are noted
MiB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Noted:
    """Totals at one moment. `hits` is None where the page cache does not tell."""

    now_ns: int
    prompt_tokens: int
    generated_tokens: int
    requests: int
    hits: int | None
    bytes_read: int
    compute_ns: int  # of decode steps, as the two below
    disk_ns: int
    coordination_ns: int


class Rates:
    """Totals of the last `WINDOW_NS`."""

    def __init__(self, started_ns: int) -> None:
        self.started_ns = started_ns
        self._noted: deque[Noted] = deque()

    def is_due(self, now_ns: int) -> bool:
        """Whether totals should be noted again."""
        return not self._noted or now_ns - self._noted[-1].now_ns >= NOTE_NS

    def note(self, noted: Noted) -> None:
        """Totals of now."""
        self._noted.append(noted)
        while len(self._noted) > 2 and noted.now_ns - self._noted[0].now_ns > WINDOW_NS:
            self._noted.popleft()

    def recent(self) -> dict[str, Any]:
        """The part `recent` of the status."""
        if len(self._noted) < 2:
            return _rates(None, None)
        return _rates(self._noted[0], self._noted[-1])


def _rates(first: Noted | None, last: Noted | None) -> dict[str, Any]:
    if first is None or last is None or last.now_ns == first.now_ns:
        return {
            "seconds": 0.0,
            "tokens_per_second": 0.0,
            "prompt_tokens_per_second": 0.0,
            "hit_rate": None,
            "mib_per_token": None,
            "token_seconds": None,
        }
    seconds = (last.now_ns - first.now_ns) / 1e9
    drawn = last.generated_tokens - first.generated_tokens
    prompt = last.prompt_tokens - first.prompt_tokens
    requests = last.requests - first.requests
    hit_rate = None
    if last.hits is not None and first.hits is not None and requests:
        hit_rate = (last.hits - first.hits) / requests
    mib = (last.bytes_read - first.bytes_read) / MiB
    parts = {
        "compute": (last.compute_ns - first.compute_ns) / 1e9,
        "disk": (last.disk_ns - first.disk_ns) / 1e9,
        "coordination": (last.coordination_ns - first.coordination_ns) / 1e9,
    }
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(drawn / seconds, 3),
        "prompt_tokens_per_second": round(prompt / seconds, 3),
        "hit_rate": hit_rate,
        "mib_per_token": mib / (drawn + prompt) if drawn + prompt else None,
        "token_seconds": {name: part / drawn for name, part in parts.items()} if drawn else None,
    }
