"""A disk that cannot read some bytes of one tensor, and other faults, for processes that a test
starts."""

import os
from pathlib import Path

import pytest

from io_worker.gguf_header import TensorInfo

# Python imports it at its start, before anything asks for `os.preadv`. Reads past the page cache
# bring whole pages: each that has a bad byte fails.
SITE = """
import errno, os
read = os.preadv

def preadv(fd, buffers, offset, *flags):
    if offset < {stop} and offset + sum(map(len, buffers)) > {start}:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return read(fd, buffers, offset, *flags)

os.preadv = preadv
"""


def break_bytes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, info: TensorInfo, start: int, stop: int
) -> None:
    """Processes started from now on get EIO for bytes [start, stop) of a tensor."""
    text = SITE.format(start=info.offset + start, stop=info.offset + stop)
    run_at_start(monkeypatch, folder, text)


def run_at_start(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Processes started from now on run this first."""
    (folder / "sitecustomize.py").write_text(text)
    found = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *([found] if found else [])]))
