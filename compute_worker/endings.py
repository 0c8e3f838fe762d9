"""What is heard of ends of sequences while a step runs: it takes effect at a layer boundary, or
after the step. This module does not know what a sequence is."""

from shm.messages import Cancel, Finished, Forget


class Endings:
    """Requests that were cancelled, and what must wait for the end of the step."""

    def __init__(self) -> None:
        self._cancelled: set[int] = set()
        self._late: list[Finished | Forget] = []

    def note(self, message: Cancel | Finished | Forget) -> None:
        """Hear of one."""
        if isinstance(message, Cancel):
            self._cancelled.add(message.request)
        else:
            self._late.append(message)

    def take_late(self) -> list[Finished | Forget]:
        """What came during the step and must be done after it, in order."""
        late, self._late = self._late, []
        return late

    def is_cancelled(self, request: int) -> bool:
        """Whether `Cancel` came for the request."""
        return request in self._cancelled

    def forget(self, request: int) -> None:
        """The request is over."""
        self._cancelled.discard(request)
