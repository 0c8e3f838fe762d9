"""SIGINT, SIGTERM and SIGHUP of the coordinator: the first asks for a clean end.

A handler runs between bytecodes of the main thread and only takes a note; the loop looks at it.
The second signal ends a run (`Signals`), and changes nothing for work that has files or the machine
to put right first (`stop_signals`). What was ignored before stays ignored: nohup, and `&` in
scripts, mean it.
"""

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


class Signals:
    """Notes the first signal while the `with` lasts; a second one ends the process at once.

    Children die with it (PR_SET_PDEATHSIG), and nothing of ours has a name on the disk.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        for number in EXIT_CODES:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int | None:
        """What the process exits with if a signal came."""
        return EXIT_CODES[self.received] if self.received is not None else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(EXIT_CODES[signal.Signals(number)])
        self.received = signal.Signals(number)


@dataclass(slots=True)
class StopSignals:
    """The first of the signals that ask for an end; later ones change nothing."""

    received: signal.Signals | None = None

    @property
    def exit_code(self) -> int | None:
        """What the process exits with if a signal came."""
        return EXIT_CODES[self.received] if self.received is not None else None


@contextlib.contextmanager
def stop_signals(noted: Collection[int] = tuple(EXIT_CODES)) -> Iterator[StopSignals]:
    """Note signals while the `with` lasts; SIGINT, SIGTERM and SIGHUP that are not in `noted` are
    without effect on this process, and those that it starts do not ignore them for that."""
    stop = StopSignals()

    def note(number: int, frame: FrameType | None) -> None:
        if number in noted:
            stop.received = stop.received or signal.Signals(number)

    before = {
        number: signal.signal(number, note)
        for number in EXIT_CODES
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
