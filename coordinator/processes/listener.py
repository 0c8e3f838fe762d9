"""Who is told what becomes of requests and processes: what the engine asks of the job around it."""

from typing import Any, Protocol

from coordinator.core.actions import Ended
from coordinator.core.state import EndRequest
from coordinator.processes.launch import ChildSpec
from shm.messages import Sampled, StepDone


class Listener(Protocol):
    """Who is told what becomes of requests and processes."""

    def on_tokens(self, sampled: tuple[Sampled, ...]) -> list[EndRequest]:
        """New tokens; returns the requests that end because of them (stop strings)."""

    def on_ended(self, ended: Ended) -> None:
        """A request is over."""

    def on_step(self, done: StepDone) -> None:
        """A step is done."""

    def on_progress(self, process: str, phase: str, done: int, total: int) -> None:
        """A long phase of a process's start moves on."""

    def on_event(self, line: str) -> None:
        """Something an operator wants to know, key=value."""


class Front(Protocol):
    """The part of a job that talks to a process of its own, which the engine starts and watches."""

    @property
    def spec(self) -> ChildSpec:
        """The process."""

    def received(self, message: Any) -> None:
        """It sent a message; heartbeats and the messages of its birth do not come here."""

    def started(self) -> None:
        """It is ready, for the first time or again: it knows nothing yet."""

    def died(self) -> None:
        """It is dead; another is being started."""
