"""What one block was measured to do, whichever program ran in it.

A program answers with spans of whole tokens in order: this one a span per token, a peer perhaps a
span of eight. The first `n_warm_up` tokens are left out, exactly; where a span ends elsewhere the
block is refused, since a share of a span is a guess.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class BlockError(Exception):
    """A block did not give what was asked of it: one line."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens; `started` is on the monotonic clock."""

    n_tokens: int
    seconds: float
    started: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Of one block. `prompt` None: not measured. `report`: what the program says of itself."""

    prompt: Span | None
    spans: tuple[Span, ...]
    tokens: tuple[int, ...] = ()
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """The tokens that count: how many, their seconds, and from when to when."""

    n_tokens: int
    seconds: float
    start: float
    stop: float

    @property
    def tokens_per_second(self) -> float:
        """0 if nothing was measured."""
        return self.n_tokens / self.seconds if self.seconds > 0 else 0.0


def measured(spans: Sequence[Span], n_warm_up: int, n_tokens: int) -> Measured:
    """Tokens `n_warm_up` to `n_warm_up + n_tokens` of the spans. Raises `BlockError`."""
    n_before, kept = 0, []
    for span in spans:
        if n_before >= n_warm_up and n_before < n_warm_up + n_tokens:
            kept.append(span)
        elif n_before < n_warm_up < n_before + span.n_tokens:
            raise BlockError(
                f"expected a span that starts at token {n_warm_up}, found one of tokens "
                f"{n_before} to {n_before + span.n_tokens}"
            )
        n_before += span.n_tokens
    n_kept = sum(span.n_tokens for span in kept)
    if n_kept != n_tokens:
        raise BlockError(
            f"expected {n_tokens} tokens after {n_warm_up} of warm-up, found {n_kept} in spans of "
            f"{sorted({span.n_tokens for span in spans})}"
        )
    if not kept:
        return Measured(0, 0.0, 0.0, 0.0)
    stop = kept[-1].started + kept[-1].seconds
    return Measured(n_kept, sum(span.seconds for span in kept), kept[0].started, stop)
