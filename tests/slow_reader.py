"""Runs moe-coord as a single process whose every read takes some milliseconds longer.

    python slow_reader.py MILLISECONDS ARGUMENTS

A fake effect of known size: a comparison that does not find it is worth nothing. The program of
the arm without it is the same, with 0.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from io_worker import slab_reader


def slowed(read: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def wait_and_read(*arguments: Any) -> Any:
        if seconds:
            time.sleep(seconds)
        return read(*arguments)

    return wait_and_read


def main() -> None:
    seconds = float(sys.argv[1]) / 1e3
    slab_reader.READERS = {  # type: ignore[misc]  # before the program looks
        name: slowed(read, seconds) for name, read in slab_reader.READERS.items()
    }
    from coordinator import single_process

    sys.argv[1:] = sys.argv[2:]
    sys.exit(single_process.main())


if __name__ == "__main__":
    main()
