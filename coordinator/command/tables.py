"""Tables for people on standard output: as wide as the terminal, plain where there is none."""

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS = 120  # width where there is no terminal


class PipeConsole(Console):
    """rich ends the process with 1 when its reader is gone; here the entry point decides."""

    def on_broken_pipe(self) -> None:
        """See `rich.console.Console`."""
        raise BrokenPipeError


def console_on(output: TextIO) -> Console:
    """A console for results: nothing is highlighted, long lines are left to the terminal."""
    width = None if output.isatty() else PIPE_COLUMNS
    return PipeConsole(file=output, width=width, highlight=False, soft_wrap=True)


def print_table(
    console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """A title, then a table whose first column is text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for index, name in enumerate(head):
        table.add_column(name, no_wrap=True, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()
