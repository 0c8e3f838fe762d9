"""What may end the compute side by no fault of ours, with the exit code of each.

Used by the process of its own and by ``--single-process``, so that both end alike.
"""

from collections.abc import Mapping

from compute_worker.kernels import KernelError
from compute_worker.locked import LockRefused
from io_worker.gguf_header import ModelFormatError
from io_worker.read_queue import ThreadsError
from io_worker.reader import ReadError
from shm.pool import PoolError

EXIT_CONFIGURATION, EXIT_MODEL, EXIT_RESOURCES = 2, 3, 4
EXIT_CODES: Mapping[type[Exception], int] = {
    KernelError: EXIT_CONFIGURATION,
    ModelFormatError: EXIT_MODEL,
    ReadError: EXIT_MODEL,
    PoolError: EXIT_RESOURCES,
    LockRefused: EXIT_RESOURCES,
    ThreadsError: EXIT_RESOURCES,
    MemoryError: EXIT_RESOURCES,
}
EXPECTED = tuple(EXIT_CODES)


def ending(error: Exception) -> tuple[int, str]:
    """Exit code and line of one of `EXPECTED`."""
    code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
    return code, str(error) or "out of memory"
