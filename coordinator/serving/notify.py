"""Tells the service manager how the run is: ready, alive, stopping.

One datagram per piece of news, ``KEY=VALUE`` lines, to the Unix socket whose path the manager gives
(`--notify-socket`, systemd's ``$NOTIFY_SOCKET``; see sd_notify(3)). Knows nothing of what runs: the
loop that must not hang says that it is alive, so the watchdog judges that loop and nothing else.

Rule to keep: a manager that does not listen must never slow or end the run. Sends do not block, and
one that fails is dropped.
"""

import contextlib
import socket

ALIVE_INTERVAL_SECONDS = 2.0  # the unit's WatchdogSec is 30: several may be lost
START_EXTENSION_SECONDS = 60  # while it starts and moves on, so much longer may the start take


class Notifier:
    """The line to the service manager; without an address it says nothing. A context manager."""

    def __init__(self, address: str | None) -> None:
        """`address`: a path, or a name of the abstract namespace after ``@``."""
        self._socket: socket.socket | None = None
        self._is_ready = False
        self._next_alive = 0.0
        if address is not None:
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def __enter__(self) -> "Notifier":
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ready(self, status: str) -> None:
        """Answers can be given; `status` is one line for people."""
        self._is_ready = True
        self._send(f"READY=1\nSTATUS={status}")

    def alive(self, now: float) -> None:
        """The loop goes round. `now` is monotonic; most calls send nothing."""
        if now < self._next_alive:
            return
        self._next_alive = now + ALIVE_INTERVAL_SECONDS
        if self._is_ready:
            self._send("WATCHDOG=1")
        else:
            self._send(f"EXTEND_TIMEOUT_USEC={START_EXTENSION_SECONDS * 1_000_000}")

    def stopping(self) -> None:
        """No more answers; what runs is being ended."""
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(text.encode(), self._address)
