"""The link between compute and the decision core where both are in one process.

Messages are handed over as objects; what the core asks for is performed at once. Knows nothing of
what compute does with them.
"""

import os
import select
import time
from collections import deque
from typing import Any

from coordinator.command.signals import Signals
from coordinator.command.terminal import Terminal
from coordinator.core.actions import (
    Action,
    Deliver,
    Ended,
    SlotMemory,
    StopWith,
    ToCompute,
    ToWorker,
)
from coordinator.core.state import Core, EndRequest, Event, FromCompute, FromReader
from coordinator.processes.engine import COMPUTE, EngineError
from coordinator.processes.memory_watch import MemoryWatch
from io_worker.read_queue import ReadQueue
from shm.messages import Progress, ReadSlabs, SlotsPunched

READ_WAIT_SECONDS = 0.1


class CoreLink:
    """The `Link` of compute to a core in the same process. Reads happen in its `receive`."""

    def __init__(
        self,
        core: Core,
        queue: ReadQueue,
        memory: MemoryWatch,
        signals: Signals,
        terminal: Terminal,
    ) -> None:
        self.core = core
        self.memory = memory
        self.deliveries: list[Deliver | Ended] = []
        self._queue = queue
        self._signals = signals
        self._terminal = terminal
        self._inbox: deque[Any] = deque()
        self._cancelled_for_signal = False

    def send(self, message: Any) -> None:
        """See `Link`."""
        if isinstance(message, Progress):
            self._terminal.progress(message.phase, message.done, message.total)
        else:
            self.handle(FromCompute(message))

    def receive(self) -> Any:
        """See `Link`."""
        while not self._inbox:
            if not self._collect():
                select.select([self._queue.completion_fd], [], [], READ_WAIT_SECONDS)
        return self._inbox.popleft()

    def poll(self) -> Any | None:
        """See `Link`. A signal cancels the running request at the next layer."""
        if self._queue.n_in_flight:  # else there is nothing to ask the system for
            self._collect()
        else:
            self._watch_memory()
        if self._signals.received is not None and not self._cancelled_for_signal:
            step = self.core.requests.running_step
            if step is not None:
                self._cancelled_for_signal = True
                for part in step.slices:
                    self.handle(EndRequest(part.request, "cancelled"))
        return self._inbox.popleft() if self._inbox else None

    def handle(self, event: Event) -> None:
        """One event through the core; deliveries are kept for the runner."""
        self.perform(self.core.handle(event))

    def wait_read(self) -> None:
        """Wait until a read ends."""
        select.select([self._queue.completion_fd], [], [], READ_WAIT_SECONDS)
        self._collect()

    def _collect(self) -> bool:
        self._watch_memory()
        completions = self._queue.collect()
        for completion in completions:
            self.handle(FromReader(COMPUTE, completion))
        return bool(completions)

    def _watch_memory(self) -> None:
        now, own = time.monotonic(), (os.getpid(),)
        self.memory.account(own, now)
        if (target := self.memory.look(own, now)) is not None:
            self.handle(target)
        for line in self.memory.take_lines():
            self._terminal.line(line)

    def perform(self, actions: list[Action]) -> None:
        """What the core asks for."""
        for action in actions:
            match action:
                case ToCompute(message):
                    self._inbox.append(message)
                case ToWorker(_, ReadSlabs(reads)):
                    self._queue.submit(reads)
                case ToWorker(_, SlotsPunched(slots)):
                    self._queue.forget(slots)
                case _ if isinstance(action, SlotMemory):
                    self.memory.perform(action)
                case Deliver() | Ended():
                    self.deliveries.append(action)
                case StopWith(exit_code, text):
                    raise EngineError(exit_code, text)
