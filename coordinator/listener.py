"""Who is told what becomes of requests and processes: what the engine asks of the job around it."""

from typing import Protocol

from coordinator.actions import Ended
from coordinator.state import EndRequest
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
