"""News for the service manager, over a real datagram socket."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_program import RunningProgram, free_port

from coordinator.serving.notify import ALIVE_INTERVAL_SECONDS, Notifier

ABSTRACT = f"moe-coord-test-{os.getpid()}"


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A service manager's socket, and its address as systemd writes it."""
    path = str(tmp_path / "notify")
    name, address = (path, path) if request.param == "path" else (f"\0{ABSTRACT}", f"@{ABSTRACT}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name)
        listener.settimeout(30)
        yield listener, address


def heard(listener: socket.socket) -> list[str]:
    """All that waits."""
    listener.setblocking(False)
    news = []
    try:
        while True:
            news.append(listener.recv(4096).decode())
    except BlockingIOError:
        return news


def test_what_is_said(manager: tuple[socket.socket, str]) -> None:
    listener, address = manager
    steps = [
        (0.0, ["EXTEND_TIMEOUT_USEC=60000000"]),
        (ALIVE_INTERVAL_SECONDS - 0.1, []),
        (ALIVE_INTERVAL_SECONDS, ["EXTEND_TIMEOUT_USEC=60000000"]),
        ("ready", ["READY=1\nSTATUS=http://x"]),
        (2 * ALIVE_INTERVAL_SECONDS, ["WATCHDOG=1"]),
        (2 * ALIVE_INTERVAL_SECONDS + 0.1, []),
        (100.0, ["WATCHDOG=1"]),
    ]
    with Notifier(address) as notifier:
        for step, expected in steps:
            if isinstance(step, float):
                notifier.alive(step)
            else:
                notifier.ready("http://x")
            assert heard(listener) == expected, step
        notifier.stopping()
    assert heard(listener) == ["STOPPING=1"]


@pytest.mark.parametrize("address", [None, "/nonexistent/notify"])
def test_nobody_listens(address: str | None) -> None:
    with Notifier(address) as notifier:
        notifier.ready("up")
        notifier.alive(1.0)
        notifier.stopping()


def test_a_manager_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        with Notifier(path) as notifier:
            for now in range(10_000):  # far more than its queue holds
                notifier.alive(now * ALIVE_INTERVAL_SECONDS)
        assert 0 < len(heard(listener)) < 10_000


def test_a_service_from_start_to_end(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        listener.settimeout(30)
        with RunningProgram(
            *("--port", str(free_port()), "--metrics-port", "0", "--notify-socket", path)
        ) as program:
            news = [listener.recv(4096).decode()]
            while not news[-1].startswith("READY=1"):
                assert news[-1].startswith("EXTEND_TIMEOUT_USEC=")
                news.append(listener.recv(4096).decode())
            assert listener.recv(4096) == b"WATCHDOG=1"
            assert listener.recv(4096) == b"WATCHDOG=1"  # also while there is nothing to do
            program.process.send_signal(signal.SIGTERM)
            last = b""
            while last != b"STOPPING=1":
                last = listener.recv(4096)
            assert program.end() == 143
