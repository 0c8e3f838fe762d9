"""What a person sees on standard error: lines, warnings, progress.

Standard output carries generated text or JSON and nothing else. Progress is a bar on a terminal
and a plain line a second elsewhere. Only this module imports rich.
"""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from coordinator.command.streams import lasting_errors, write_output

PLAIN_INTERVAL_SECONDS = 1.0


class Terminal:
    """Standard error of one run. Use as a context manager, so that a bar never stays behind."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(file=lasting_errors(), highlight=False, soft_wrap=True)
        self._quiet = quiet
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._next_plain: dict[str, float] = {}  # by phase; short ones say nothing

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.end_progress()

    def line(self, text: str) -> None:
        """One line of information."""
        if not self._quiet:
            self._console.print(text, markup=False)

    def warning(self, text: str) -> None:
        """One line that is shown also when quiet."""
        self._console.print(f"warning: {text}", markup=False, style="yellow")

    def progress(self, name: str, done: int, total: int) -> None:
        """A long phase moves on; its bar goes when it is done."""
        if self._quiet or total <= 0:
            return
        if not self._console.is_terminal:
            self._plain(name, done, total)
            return
        if done >= total:
            self._end_bar(name)
            return
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._tasks[name], completed=done, total=total)

    def end_progress(self) -> None:
        """Take the bars away: text follows."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks.clear()

    def _end_bar(self, name: str) -> None:
        """The last one takes the display with it: nobody else may end it, as in a service."""
        if self._bars is not None and name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
            if not self._tasks:
                self.end_progress()

    def _plain(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total:
            self._next_plain.pop(name, None)
        elif now >= self._next_plain.setdefault(name, now + PLAIN_INTERVAL_SECONDS):
            self._next_plain[name] = now + PLAIN_INTERVAL_SECONDS
            self.line(f"{name}: {100 * done // total} %")


class TextOutput:
    """Standard output for generated text. A reader that went away is remembered, not an error."""

    def __init__(self) -> None:
        self.is_closed = False

    def write(self, text: str) -> None:
        """Print at once. Raises `OutputError`."""
        if self.is_closed or not text:
            return
        try:
            write_output(text)
        except BrokenPipeError:
            self.is_closed = True
