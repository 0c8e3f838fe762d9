"""Paths that are no readable regular file, texts in messages, and descriptors."""

import gc
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import U8, entry, gguf
from hypothesis import given
from hypothesis import strategies as st

from io_worker import model_bytes
from io_worker.gguf_header import read_header
from io_worker.model_bytes import Cursor, ModelFormatError, escaped, excerpt

WHOLE = gguf([entry("key", U8, 1)])


def refusal(path: str | Path) -> ModelFormatError:
    with pytest.raises(ModelFormatError) as caught:
        read_header(path)
    return caught.value


def as_nobody(action: Callable[[], None]) -> None:
    """Run without root's right to read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)
    try:
        action()
    finally:
        os.seteuid(user)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


ODD_PATHS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "No such file or directory"),
    "directory": (lambda path: path.mkdir(), "found a directory; give the path of a .gguf file"),
    "fifo": (os.mkfifo, "expected a regular file, found a FIFO"),
    "socket": (make_socket, "No such device or address"),
    "zero": (lambda path: path.symlink_to("/dev/zero"), "found a device"),
    "null": (lambda path: path.symlink_to("/dev/null"), "found a device"),
    "loop": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "dangling": (lambda path: path.symlink_to("gone"), "No such file or directory"),
    "inside-a-file": (lambda path: path.parent.joinpath("m").write_bytes(b""), "No such file"),
}


@pytest.mark.parametrize("kind", ODD_PATHS)
def test_refuses_what_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    make, fragment = ODD_PATHS[kind]
    path = tmp_path / "m.gguf"
    make(path)
    started = time.monotonic()
    error = refusal(path)
    assert time.monotonic() - started < 10
    assert error.field == "file" and fragment in str(error)


def test_refuses_a_file_it_may_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(WHOLE)
    path.chmod(0)
    errors: list[ModelFormatError] = []
    as_nobody(lambda: errors.append(refusal(path)))
    assert "Permission denied" in str(errors[0])


@pytest.mark.parametrize(
    ("path", "fragment"),
    [
        ("", "No such file"),
        ("a\0b", "embedded null byte"),
        ("x" * 5000, "File name too long"),
        ("no\nsuch\x1b[31m", "no\\nsuch\\x1b[31m"),
        ("lone\ud800surrogate", "lone\\ud800surrogate"),
        ("bytes\udcff", "bytes\\udcff"),
    ],
)
def test_refuses_odd_path_texts(path: str, fragment: str) -> None:
    line = str(refusal(path))
    assert fragment in line and line.isprintable()


def test_descriptors_are_closed(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(WHOLE)
    bad.write_bytes(WHOLE[:30])
    gc.collect()  # what earlier tests left is not closed in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    read_header(good)
    for path in (bad, tmp_path, tmp_path / "missing"):
        refusal(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_refuses_a_header_longer_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([entry(f"key{index}", U8, 1) for index in range(100)]))
    monkeypatch.setattr(model_bytes, "MAX_METADATA_BYTES", 1000)
    assert "expected a header of at most 1000 bytes" in str(refusal(path))


def test_refuses_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(WHOLE)
    with path.open("rb") as file:
        cursor = Cursor(str(path), file.fileno())
        os.truncate(path, 10)
        with pytest.raises(ModelFormatError, match="found 10: file shrank"):
            cursor.need(20, "n_kv")


def test_a_failing_read_is_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(WHOLE)
    with path.open("ab") as file:  # a descriptor that cannot be read
        cursor = Cursor(str(path), file.fileno())
        with pytest.raises(ModelFormatError, match="found: Bad file descriptor"):
            cursor.need(4, "magic")


@given(text=st.text())
def test_escaped_text_is_one_printable_line(text: str) -> None:
    line = escaped(text)
    assert line.isprintable()
    assert line == text or not text.isprintable()


def test_a_message_stays_short_and_keeps_its_fault() -> None:
    error = ModelFormatError("m.gguf", "k" * 65_535, "expected 1, found 2", 24)
    assert excerpt("k" * 65_535) == "k" * 120 + "…"
    assert str(error) == f"m.gguf: {'k' * 120}…: expected 1, found 2 (byte 24)"
    assert str(ModelFormatError("m.gguf", "k", "gone")) == "m.gguf: k: gone"
