"""Messages typed at a terminal: line editing and history of GNU readline, and texts of many lines.

A message is one line; a line that ends with a backslash goes on in the next; between two lines of
three quotes stands a longer text. Text that is pasted keeps its line ends (readline's bracketed
paste). Without a terminal the lines of standard input are read the same way.
"""

import contextlib
import os
import readline
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

QUOTES = '"""'
MORE = "… "
MAX_HISTORY = 1000
PRIVATE = 0o600  # what was asked is nobody else's business


def default_history() -> Path:
    """Where lines are remembered."""
    return Path.home() / ".local" / "state" / "moe-coord" / "chat-history"


@contextlib.contextmanager
def remembered(path: Path, commands: Sequence[str]) -> Iterator[str | None]:
    """Line editing with the history of a file and completion of commands, while the `with` lasts.

    Gives why lines are not remembered, None if they are.
    """
    trouble = None
    readline.set_history_length(MAX_HISTORY)
    readline.set_completer_delims("")
    readline.set_completer(_completer(commands))
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, PRIVATE))
        readline.read_history_file(path)
    except OSError as error:
        trouble = f"lines are not remembered: {path}: {error.strerror}"
    try:
        yield trouble
    finally:
        if trouble is None:
            with contextlib.suppress(OSError):  # a full disk must not spoil the end
                readline.write_history_file(path)


def _completer(commands: Sequence[str]) -> Callable[[str, int], str | None]:
    def complete(text: str, state: int) -> str | None:
        found = [name for name in commands if name.startswith(text)] if text else []
        return found[state] if state < len(found) else None

    return complete


def read_message(prompt: str) -> str | None:
    """The next message; None at the end of input. Raises `KeyboardInterrupt` (Ctrl-C)."""
    is_terminal = sys.stdin.isatty()
    lines: list[str] = []
    is_quoted = False
    while (line := _line(MORE if lines or is_quoted else prompt, is_terminal)) is not None:
        if line.strip() == QUOTES:
            if is_quoted:
                return "\n".join(lines)
            is_quoted = True
        elif not is_quoted and line.endswith("\\"):
            lines.append(line[:-1])
        else:
            lines.append(line)
            if not is_quoted:
                return "\n".join(lines)
    return "\n".join(lines) if lines else None


def _line(prompt: str, is_terminal: bool) -> str | None:
    try:
        return input(prompt if is_terminal else "")
    except EOFError:
        return None
