"""The standard streams of the program: open whatever the caller left, and text that goes out.

Only generated text and results go to standard output; everything for people goes to `terminal`.
"""

import io
import os
import sys
from typing import Any, TextIO

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by descriptor number


class OutputError(Exception):
    """Standard output takes nothing; the text is one line."""


class _LastingFile(io.FileIO):
    """A file whose reader may go: what is written then is lost, and nobody fails for it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or len(data)  # a full pipe that does not block: lost too
        except OSError:
            return len(data)


def lasting_errors() -> TextIO:
    """Standard error for a program that outlives whoever reads it: its terminal may be closed, or
    the end of its pipe. The stream does not own the descriptor."""
    raw = _LastingFile(sys.stderr.fileno(), "w", closefd=False)
    encoding = sys.stderr.encoding
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True
    )


def open_missing_streams() -> None:
    """Give a closed standard stream to /dev/null. Call before anything is opened.

    The number of a closed one would go to the next file: a child would find /dev/null where its
    model should be, and lines for people would land in a file of the user.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def write_output(text: str) -> None:
    """Print at once. Raises `BrokenPipeError` when the reader is gone, else `OutputError`."""
    try:
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"standard output: cannot write: {error.strerror}; send it to a place with room"
        ) from error


def let_output_go() -> None:
    """Whoever read standard output has enough: Python must not flush it again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
