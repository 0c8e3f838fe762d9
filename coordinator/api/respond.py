"""Answers of generations over HTTP: whole, or as a stream of server-sent events.

Whoever asked may leave at any moment: then the generation is ended. A stream says with comments
(lines that begin with a colon, which clients skip) that a long prompt moves on. An error after the
stream has begun is an event with `error`.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from coordinator.api.answer import Finish, Piece, Waiting, follow
from coordinator.api.backend import Generation
from coordinator.api.errors import ApiError, dumped, error_response, json_response
from coordinator.api.shapes import Shape, timings, usage
from coordinator.text.stream import TextStream
from shm.messages import Sampled

COMMENT_SECONDS = 1.0  # at most one in this time
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the events
]


class Answer:
    """One answer as an ASGI response. The generation is closed when it returns."""

    def __init__(
        self,
        generation: Generation,
        text: TextStream,
        shape: Shape,
        n_prompt: int,
        *,
        is_stream: bool,
        include_usage: bool,
    ) -> None:
        self.background = None
        self._generation = generation
        self._text = text
        self._shape = shape
        self._n_prompt = n_prompt
        self._is_stream = is_stream
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or stop when the client leaves."""
        answer = self._stream(send) if self._is_stream else self._whole(scope, receive, send)
        try:
            await unless_gone(answer, receive)
        finally:
            self._generation.close()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        text, tokens = "", list[Sampled]()
        try:
            async for part in follow(self._generation, self._text, self._n_prompt):
                match part:
                    case Piece():
                        text += part.text
                        tokens += part.tokens
                    case Finish():
                        body = self._shape.whole(text, tuple(tokens), part.reason)
                        body["usage"] = usage(self._n_prompt, part)
                        body["timings"] = timings(part.figures)
                        await json_response(body)(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        async for event in self._events():
            await send(_body(event))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[str]:
        first = self._shape.chunks_before()  # with the first token, since clients time it by them
        held = list[Sampled]()  # tokens whose text is not certain yet
        next_comment = time.monotonic() + COMMENT_SECONDS
        try:
            async for part in follow(self._generation, self._text, self._n_prompt):
                while first and not isinstance(part, Waiting):
                    yield _event(first.pop(0))
                match part:
                    case Waiting():
                        if time.monotonic() >= next_comment:
                            next_comment = time.monotonic() + COMMENT_SECONDS
                            yield _comment(part)
                    case Piece():
                        held += part.tokens
                        if part.text:
                            yield _event(self._shape.chunk(part.text, tuple(held), None))
                            held.clear()
                    case Finish():
                        last = self._shape.chunk("", tuple(held), part.reason)
                        yield _event({**last, "timings": timings(part.figures)})
                        if self._include_usage:
                            counted = {"usage": usage(self._n_prompt, part)}
                            yield _event({**self._shape.without_choice(), **counted})
        except ApiError as error:
            yield _event(error.body())
        yield "data: [DONE]\n\n"


async def unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do the work, but stop it when the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for left in (task, gone):
            left.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await left


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(text: str) -> Message:
    return {
        "type": "http.response.body",
        "body": text.encode("utf-8", "replace"),
        "more_body": True,
    }


def _event(value: object) -> str:
    return f"data: {dumped(value)}\n\n"


def _comment(waiting: Waiting) -> str:
    if not waiting.has_begun:
        return ": waiting for its turn\n\n"
    return f": prompt {waiting.done} of {waiting.total} tokens\n\n"
