"""Gives memory back to the system that was freed and is kept for later.

What starting a process takes and frees again (headers, vocabularies, the building of a tokenizer)
counts as its own until then, and a budget would have to hold it for the whole run.
"""

import ctypes
import gc


def give_back_freed() -> None:
    """Of this process; takes some milliseconds. Where the C library cannot, little is done."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))
