"""From the tokens of one generation to pieces of text, as they come.

Here stop strings are seen and the request is ended for them. Knows no HTTP and no JSON.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from coordinator.api.backend import Generation
from coordinator.api.errors import ApiError
from coordinator.text.stream import TextStream
from shm.messages import Sampled
from shm.service_messages import AnswerFigures, Began, GenerationEnded, PromptProgress

QUIET_SECONDS = 2.0  # after so long without news there is a `Waiting`
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing new: the request waits, or its prompt is computed. `done` of `total` tokens are."""

    has_begun: bool
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain now (perhaps none), and the tokens since the last piece."""

    text: str
    tokens: tuple[Sampled, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The last: why it ended ("stop" or "length"), and what it took."""

    reason: str
    n_tokens: int
    figures: AnswerFigures


Part = Waiting | Piece | Finish


async def follow(generation: Generation, text: TextStream, n_prompt: int) -> AsyncIterator[Part]:
    """The parts of an answer until its `Finish`; raises `ApiError` if it fails."""
    n_tokens, done = 0, 0
    while True:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                event = await generation.events.get()
        except TimeoutError:
            yield Waiting(generation.has_begun, done, n_prompt)
            continue
        match event:
            case Began(_, n_cached):
                done = n_cached
            case PromptProgress():
                done = event.done
                yield Waiting(True, done, n_prompt)
            case Sampled() if text.stopped is None:
                n_tokens += 1
                piece = text.push(event.token)
                if text.stopped is not None:
                    generation.stop()
                yield Piece(piece, (event,))
            case GenerationEnded():
                rest = text.finish()
                if rest:
                    yield Piece(rest, ())
                yield Finish(_reason(event, text), n_tokens, event.figures)
                return


def _reason(ended: GenerationEnded, text: TextStream) -> str:
    """As clients know it; raises `ApiError` for an answer that did not come to its end."""
    if text.stopped is not None:
        return "stop"
    if ended.reason in FINISH_REASONS:
        return FINISH_REASONS[ended.reason]
    if ended.reason == "cancelled":
        raise ApiError(503, "the service ended before the answer did", code="draining")
    raise ApiError(500, ended.error or "the engine failed", code="engine_error")
