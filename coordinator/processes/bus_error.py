"""Makes SIGBUS the last line of a process that maps model files and has nobody above it.

A page of a mapped file that cannot be had ends a process with SIGBUS. Where compute is a process of
its own, its death is seen and explained (`health`); with ``--single-process`` the signal itself has
to say what it means. It is raised by the very instruction that misses the page, so going on is
impossible, and Python's own handlers, which wait for the next byte code, would wait for ever.
"""

import ctypes
import os
import signal

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


def end_on_bus_error(line: str, exit_code: int) -> None:
    """From now on SIGBUS writes the line to standard error and ends the process with the code.

    The handler may run in any thread, with or without the interpreter's lock, which it takes. The
    faults are in kernels and copies: they hold no other lock that it would need.
    """
    message = f"{line}\n".encode()

    def end(_: int) -> None:
        os.write(2, message)
        os._exit(exit_code)

    handler = _HANDLER(end)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))  # the kernel keeps its address
    ctypes.CDLL(None).signal(int(signal.SIGBUS), handler)
