"""What was freed goes back to the system."""

import ctypes
from pathlib import Path

import pytest

from shm.free_memory import give_back_freed

MiB = 1 << 20
N_PIECES, PIECE_BYTES = 4000, 60_000  # below the size from which each is a mapping of its own


def anonymous_bytes() -> int:
    (line,) = [n for n in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in n]
    return int(line.split()[1]) * 1024


def test_freed_pieces_between_kept_ones_go_back() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("needs the C library of GNU")
    pieces = [bytearray(b"x") * PIECE_BYTES for _ in range(N_PIECES)]
    kept = pieces[::40]  # a heap shrinks by itself only from its end
    del pieces
    before = anonymous_bytes()
    give_back_freed()
    assert before - anonymous_bytes() > 100 * MiB
    assert all(piece == b"x" * PIECE_BYTES for piece in kept)
