"""SIGINT, SIGTERM and SIGHUP of the coordinator: the first asks for a clean end, the second ends.

A handler runs between bytecodes of the main thread and only takes a note; the loop looks at it.
"""

import os
import signal
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
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup and `&` in scripts mean it
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
