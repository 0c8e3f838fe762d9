"""The engine as the HTTP process sees it: requests go in, tokens come out, one queue per request.

Knows messages, not sockets (`send` is brought) and not text. For one event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from coordinator.api.counts import HttpCounts
from coordinator.api.errors import ApiError
from coordinator.api.settings import HttpSettings
from shm.messages import Sampled, Sampling
from shm.service_messages import (
    Began,
    Drawn,
    EndGeneration,
    Generate,
    GenerationEnded,
    PromptProgress,
    ServiceState,
    StatusSnapshot,
    WantStatus,
)

Event = Began | PromptProgress | Sampled | GenerationEnded
STATUS_SECONDS = 0.25  # a snapshot is shown to all who ask within this time
STATUS_WAIT_SECONDS = 5.0
N_REMEMBERED = 8  # answers whose duration tells how long a wait is
MAX_RETRY_SECONDS = 60


class Generation:
    """One running request. Whoever has it must call `close`."""

    def __init__(self, backend: "Backend", number: int) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.has_begun = False
        self.started = time.monotonic()
        self.last_token: float | None = None
        self._backend = backend
        self._number = number

    def stop(self) -> None:
        """The text is complete: a stop string came."""
        self._backend.end(self._number, "stop")

    def close(self) -> None:
        """Nobody listens any more; ends the request if it runs."""
        self._backend.forget(self._number)


class Backend:
    """All running requests and the state of the service."""

    def __init__(
        self, send: Callable[[Any], None], settings: HttpSettings, counts: HttpCounts
    ) -> None:
        self.state = ServiceState("starting", False)
        self._send = send
        self._settings = settings
        self._counts = counts
        self._n_requests = 0
        self._running: dict[int, Generation] = {}
        self._durations: deque[float] = deque(maxlen=N_REMEMBERED)
        self._status = ""
        self._status_time = -STATUS_WAIT_SECONDS
        self._status_waiting: list[asyncio.Future[str]] = []

    @property
    def n_queued(self) -> int:
        """Requests that no step has worked on yet."""
        return sum(1 for generation in self._running.values() if not generation.has_begun)

    def check_open(self) -> None:
        """Whether a request would be taken now; raises `ApiError`."""
        if not self.state.can_answer:
            raise ApiError(
                503,
                f"the service is {self.state.state}; try again",
                code=self.state.state,
                headers={"Retry-After": "2"},
            )
        if len(self._running) >= self._settings.parallel + self._settings.queue:
            raise ApiError(
                429,
                f"{self._settings.parallel} answers are computed and {self._settings.queue} "
                "requests wait, which is the limit; try again later",
                code="queue_full",
                headers={"Retry-After": str(self._retry_seconds())},
            )

    def submit(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        n_top_logprobs: int,
    ) -> Generation:
        """Begin a request; raises `ApiError` where the service takes none."""
        self.check_open()
        self._n_requests += 1
        number = self._n_requests
        generation = self._running[number] = Generation(self, number)
        ids = tuple(sorted(stop_ids))
        self._send(Generate(number, prompt, sampling, max_tokens, ids, n_top_logprobs))
        return generation

    def end(self, number: int, reason: str) -> None:
        """End a request that runs; what it still sends is heard."""
        if number in self._running:
            self._send(EndGeneration(number, reason))

    def forget(self, number: int) -> None:
        """End a request if it runs, and hear no more of it."""
        self.end(number, "cancelled")
        self._running.pop(number, None)

    async def status(self) -> str:
        """The status as JSON text, of this moment or little older; raises `ApiError`."""
        if time.monotonic() - self._status_time < STATUS_SECONDS:
            return self._status
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._status_waiting.append(waiting)
        if len(self._status_waiting) == 1:
            self._send(WantStatus())
        try:
            async with asyncio.timeout(STATUS_WAIT_SECONDS):
                return await waiting
        except TimeoutError:
            self._status_waiting.clear()
            raise ApiError(503, "the coordinator does not answer; try again") from None

    def receive(self, message: Any) -> None:
        """A message of the coordinator. Raises `AssertionError` for one that is not for us."""
        match message:
            case Drawn(tokens):
                for token in tokens:
                    self._drawn(token)
            case Began(request) | PromptProgress(request):
                generation = self._running.get(request)
                if generation is not None:
                    generation.has_begun = True
                    generation.events.put_nowait(message)
            case GenerationEnded(request):
                generation = self._running.pop(request, None)
                if generation is not None:
                    self._durations.append(time.monotonic() - generation.started)
                    generation.events.put_nowait(message)
            case ServiceState():
                self.state = message
            case StatusSnapshot(text):
                self._status, self._status_time = text, time.monotonic()
                waiting, self._status_waiting = self._status_waiting, []
                for future in waiting:
                    if not future.done():
                        future.set_result(text)
            case _:
                raise AssertionError(f"no rule for {type(message).__name__}")

    def _drawn(self, token: Sampled) -> None:
        generation = self._running.get(token.request)
        if generation is None:
            return
        now = time.monotonic()
        if generation.last_token is None:
            self._counts.first_token.observe(round(1e9 * (now - generation.started)))
        else:
            self._counts.next_token.observe(round(1e9 * (now - generation.last_token)))
        generation.last_token = now
        generation.events.put_nowait(token)

    def _retry_seconds(self) -> int:
        """About when the next running answer makes room."""
        if not self._durations:
            return 1
        mean = sum(self._durations) / len(self._durations)
        return min(MAX_RETRY_SECONDS, max(1, round(mean / self._settings.parallel)))
