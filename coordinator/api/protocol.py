"""Limits of connections that uvicorn does not have: time for a request's head, and for a reader.

Whoever sends a head slower than `HEAD_SECONDS`, or takes nothing of an answer for `READER_SECONDS`,
is disconnected; so nobody holds a connection for nothing.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 5
READER_SECONDS = 20.0


class LimitedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        _cancel(self._head_timer)
        _cancel(self._reader_timer)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """A request's head is complete when there is a cycle that runs."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._head_timer)

    def on_response_complete(self) -> None:
        """The time for the next request's head begins."""
        _cancel(self._head_timer)
        if not self.transport.is_closing():
            seconds = KEEP_ALIVE_SECONDS + HEAD_SECONDS
            self._head_timer = self.loop.call_later(seconds, self.transport.abort)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads slower than we write."""
        super().pause_writing()
        self._reader_timer = self.loop.call_later(READER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read enough."""
        _cancel(self._reader_timer)
        super().resume_writing()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
