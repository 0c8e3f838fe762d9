"""`moe-coord top`: the status of a running service in the terminal, until q or Ctrl-C."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from coordinator.command.client_commands import TopCommand
from coordinator.command.tables import PIPE_COLUMNS, console_on
from coordinator.serving.service_client import ServiceClient, ServiceError, key_of
from coordinator.serving.top_view import Earlier, Status, view

PIPE_ROWS = 200  # where there is no terminal nothing is left out


def run_top(command: TopCommand) -> int:
    """Show the status; returns the exit code. Raises `ServiceError` if the first look fails."""
    client = ServiceClient(command.url, key_of(command.api_key))
    console = console_on(sys.stdout)
    status = client.status()
    if command.once or not console.is_terminal:
        size = (console.width, PIPE_ROWS) if console.is_terminal else (PIPE_COLUMNS, PIPE_ROWS)
        has_colour = console.color_system is not None
        console.print(
            view(status, command.url, None, time.monotonic(), size, has_colour=has_colour)
        )
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _watch(client, command, console, status)
    return 0


def _watch(client: ServiceClient, command: TopCommand, console: Console, status: Status) -> None:
    earlier = trouble = None
    with keys_at_once(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now = time.monotonic()
            size = (console.width, console.height - (trouble is not None))
            has_colour = console.color_system is not None
            shown = view(status, command.url, earlier, now, size, has_colour=has_colour)
            if trouble is not None:
                shown = Text(f"{trouble}\n", style="red").append_text(shown)
            live.update(shown, refresh=True)
            cpu = {process["name"]: process["cpu_seconds"] for process in status["processes"]}
            if trouble is None:
                earlier = Earlier(cpu, now)
            if quit_was_pressed(command.interval_seconds):
                return
            try:
                status, trouble = client.status(), None
            except ServiceError as error:
                trouble = str(error)


@contextlib.contextmanager
def keys_at_once() -> Iterator[None]:
    """Keys without Enter and without an echo; Ctrl-C goes on to be a signal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def quit_was_pressed(timeout_seconds: float) -> bool:
    """Wait so long for a q; other keys end the wait: a look at once."""
    if not sys.stdin.isatty():
        time.sleep(timeout_seconds)
        return False
    if not select.select([sys.stdin], [], [], timeout_seconds)[0]:
        return False
    return os.read(sys.stdin.fileno(), 64)[:1] in (b"q", b"Q", b"")
