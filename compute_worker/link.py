"""What the compute worker sees of the coordinator: messages in, messages out.

With processes around it the link is a socket (`__main__`); with ``--single-process`` it is the
decision core itself. The engine and the feed know this protocol only.
"""

from typing import Any, Protocol


class Stopping(Exception):
    """`Stop` arrived, or the coordinator is gone: leave whatever is running."""


class Link(Protocol):
    """Messages of `shm.messages`. Reads for this process are dealt with behind it."""

    def send(self, message: Any) -> None:
        """Send without waiting for an answer."""

    def receive(self) -> Any:
        """The next message; waits for it. Raises `Stopping`."""

    def poll(self) -> Any | None:
        """The next message if one is there. Raises `Stopping`."""
