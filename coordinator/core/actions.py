"""What the decision core asks of the process around it. The core decides, the loop performs.

Those of every layer are named tuples, see `shm.messages`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from shm.messages import Sampled


class ToCompute(NamedTuple):
    """Send a message to the compute worker."""

    message: Any


class ToWorker(NamedTuple):
    """Send a message to a reader by its process name."""

    name: str
    message: Any


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tokens for their requests. The receiver may end a request (a stop string) before the core is
    asked to go on."""

    sampled: tuple[Sampled, ...]


@dataclass(frozen=True, slots=True)
class RequestsFailed:
    """All requests of the running step end with this text once compute has stopped it."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A request is over. `error` is None unless `reason` is "error"."""

    request: int
    reason: str
    error: str | None


@dataclass(frozen=True, slots=True)
class StopWith:
    """The engine cannot go on: stop everything and exit with this code and line."""

    exit_code: int
    text: str


@dataclass(frozen=True, slots=True)
class PunchSlots:
    """Give the memory of these slots back to the system. Nobody uses them."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VacateSlots:
    """The same, for slots whose content compute has in memory of its own now. They stay in use: the
    next read into one takes memory for it again."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RestoreSlots:
    """Put slots that were punched back to use: give them memory, before the next read into one."""

    slots: tuple[int, ...]


SlotMemory = PunchSlots | VacateSlots | RestoreSlots
Action = ToCompute | ToWorker | Deliver | RequestsFailed | Ended | StopWith | SlotMemory
