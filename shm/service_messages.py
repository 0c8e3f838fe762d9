"""Messages between the coordinator and the HTTP process of the service.

``C`` is the coordinator, ``H`` the HTTP process. Birth and end (`Hello`, `Welcome`, `Ready`,
`Failed`, `Heartbeat`, `Stop`) are those of `messages`. H numbers its requests itself, from 1; after
it died and was started again, all requests of its predecessor are over.

One answer::

    H -> C  Generate
    C -> H  Began                 it left the queue
    C -> H  PromptProgress …      while a long prompt is computed
    C -> H  Drawn …               tokens of all requests of a step at once
    H -> C  EndGeneration         perhaps: a stop string, or the client is gone
    C -> H  GenerationEnded       always, and the last of this request
"""

from dataclasses import dataclass

from shm.codec import decoder_of
from shm.codec import encode as encode
from shm.messages import Failed, Heartbeat, Hello, Ready, Sampled, Sampling, Stop, Welcome


@dataclass(frozen=True, slots=True)
class Generate:
    """H -> C: answer this prompt. Answered by the messages above."""

    request: int
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    n_top_logprobs: int  # likeliest tokens to be told beside each drawn one


@dataclass(frozen=True, slots=True)
class EndGeneration:
    """H -> C: end this request; `reason` is "stop" or "cancelled". Unknown ones are ignored."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Began:
    """C -> H: the prompt is being computed; `n_cached` of its tokens were known already."""

    request: int
    n_cached: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """C -> H: so much of the prompt is computed, in tokens."""

    request: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """C -> H: new tokens. The `request` of each is that of `Generate`."""

    tokens: tuple[Sampled, ...]


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """What one answer took. Experts are those of all steps while it ran, with whom it shared."""

    n_prompt: int
    n_cached: int
    n_tokens: int
    queued_ns: int
    prompt_ns: int  # first step to first token
    decode_ns: int  # first token to last
    expert_requests: int
    expert_hits: int | None  # None: the page cache does not tell
    bytes_read: int


@dataclass(frozen=True, slots=True)
class GenerationEnded:
    """C -> H: the request is over; nothing more comes of it."""

    request: int
    reason: str  # "eos", "length", "stop", "cancelled", "error"
    error: str | None
    figures: AnswerFigures


@dataclass(frozen=True, slots=True)
class ServiceState:
    """C -> H, whenever it changes: "starting", "ready", "degraded" or "draining"."""

    state: str
    can_answer: bool


@dataclass(frozen=True, slots=True)
class WantStatus:
    """H -> C: somebody looks at the status. Answered by `StatusSnapshot`."""


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """C -> H: the status as JSON text (its shape: `coordinator.serving.status`)."""

    json: str


@dataclass(frozen=True, slots=True)
class RouteCount:
    """So many more answers of a route with a status."""

    route: str
    status: int
    n: int


@dataclass(frozen=True, slots=True)
class HistogramGrowth:
    """What was added to a histogram of durations: per bucket, and to the sum."""

    counts: tuple[int, ...]
    sum_ns: int


@dataclass(frozen=True, slots=True)
class HttpGrowth:
    """H -> C, about twice a second when it has something to tell: what was counted since the last.

    Growth, not totals: the totals are kept by C and outlive H. `in_flight` and `n_queued` are
    those of now.
    """

    answers: tuple[RouteCount, ...]
    in_flight: int
    n_queued: int
    first_token: HistogramGrowth
    next_token: HistogramGrowth


MESSAGES: tuple[type, ...] = (
    Hello, Welcome, Ready, Heartbeat, Failed, Stop, Generate, EndGeneration, Began, PromptProgress,
    Drawn, GenerationEnded, ServiceState, WantStatus, StatusSnapshot, HttpGrowth,
)  # fmt: skip
decode = decoder_of(MESSAGES)
