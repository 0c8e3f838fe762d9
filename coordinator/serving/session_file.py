"""The file of `--session`: the KV cache of conversations, to go on with them another day.

::

    0     MOESESS1              what it is, and the version of its layout
    8     digest (32 bytes)     blake2b of all that follows
    40    header_bytes (u64, little endian)
    48    SessionHeader, packed
          zeros up to a multiple of 4096
          blocks of the first sequence, of the second, …, as they lie in the KV cache

A block may only be used by the model, the KV type and the arithmetic that made it: an answer must
not depend on where its beginning came from. The blocks themselves are read and written by the
compute process. A new file takes the place of the old one only when it is complete.
"""

import contextlib
import hashlib
import os
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.command.flag_values import ConfigError
from shm.codec import MessageError, decoder_for, pack, unpack

MAGIC = b"MOESESS1"
START = struct.Struct("<8s32sQ")
DIGEST_BYTES = 32
ALIGNMENT = 4096
MAX_HEADER_BYTES = 3 * 1024 * 1024  # what a message may have, and far more than contexts need
PART_BYTES = 1 << 20
_TAG = "SessionHeader"


@dataclass(frozen=True, slots=True)
class SessionKey:
    """What must be the same for blocks to be used again."""

    fingerprint: str  # of the model's header
    kv_kind: str
    numerics: str
    kernels: str
    block_bytes: int


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """`sequences` are the tokens of each, whole blocks of 64, least recently used first."""

    key: SessionKey
    sequences: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SavedSession:
    """An open file that was checked. `data_start`: where the first block lies."""

    path: Path
    fd: int
    header: SessionHeader
    data_start: int


_decode_header = decoder_for(SessionHeader)


@contextlib.contextmanager
def saved_session(path: Path) -> Iterator[SavedSession | None]:
    """What was saved, None if there is no such file yet; raises `ConfigError` for a damaged one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise ConfigError(f"--session: cannot read {path}: {error.strerror}") from error
    try:
        yield _checked(path, fd)
    finally:
        os.close(fd)


def _checked(path: Path, fd: int) -> SavedSession:
    start = os.pread(fd, START.size, 0)
    if len(start) < START.size or not start.startswith(MAGIC):
        raise _refusal(path, "expected a file that --session wrote, found another one")
    _, digest, header_bytes = START.unpack(start)
    if digest != _digest(fd):
        raise _refusal(path, "expected it whole, found it damaged or cut short")
    try:
        tag, fields = unpack(os.pread(fd, min(header_bytes, MAX_HEADER_BYTES), START.size))
        header: SessionHeader = _decode_header(fields)
    except MessageError as error:
        raise _refusal(path, f"expected a header of this version, found: {error}") from error
    if tag != _TAG:
        raise _refusal(path, f"expected a header, found {tag!r:.40}")
    return SavedSession(path, fd, header, _aligned(START.size + header_bytes))


def check_key(saved: SavedSession, key: SessionKey) -> None:
    """Whether it can be used here; raises `ConfigError` naming what differs."""
    found = saved.header.key
    for name, words in (
        ("fingerprint", "model"), ("kv_kind", "--kv-type"), ("numerics", "--numerics"),
        ("kernels", "kernels"), ("block_bytes", "bytes of a block"),
    ):  # fmt: skip
        if getattr(found, name) != getattr(key, name):
            raise _refusal(
                saved.path,
                f"expected {words} {getattr(key, name)}, found it made with {getattr(found, name)}",
            )


def _refusal(path: Path, text: str) -> ConfigError:
    return ConfigError(f"--session: {path}: {text}; give another file, or remove it")


class SessionWriter:
    """A file that is being written beside the one that it will replace. Use as a context manager.

    It has no name until it is complete, where the file system can do that.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` where nothing can be written there."""
        self._path = path
        self._directory = path.parent
        self._name: Path | None = None
        try:
            flags = os.O_RDWR | os.O_CLOEXEC
            try:
                self.fd = os.open(self._directory, flags | os.O_TMPFILE, 0o600)
            except OSError:  # not every file system knows files without a name
                self._name = self._beside()
                self.fd = os.open(self._name, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(
                f"--session: expected a place to write {path}, found {error.strerror}; give another"
            ) from error

    def __enter__(self) -> "SessionWriter":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        if self._name is not None:
            self._name.unlink(missing_ok=True)

    def begin(self, header: SessionHeader) -> int:
        """Write the header; returns where the first block belongs."""
        data = pack(_TAG, header)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, START.pack(MAGIC, bytes(DIGEST_BYTES), len(data)) + data, 0)
        start = _aligned(START.size + len(data))
        os.ftruncate(self.fd, start)
        return start

    def complete(self) -> int:
        """All blocks are there: it becomes the file of its name. Its bytes; raises `OSError`."""
        os.pwrite(self.fd, _digest(self.fd), len(MAGIC))
        os.fsync(self.fd)
        if self._name is None:
            self._name = self._beside()
            # with a directory Python asks the kernel to follow the link of /proc
            os.link(f"/proc/self/fd/{self.fd}", self._name, src_dir_fd=self.fd)
        self._name.replace(self._path)
        self._name = None
        return os.fstat(self.fd).st_size

    def _beside(self) -> Path:
        return self._directory / f".{self._path.name}.{secrets.token_hex(4)}"


def _digest(fd: int) -> bytes:
    """Of all behind the digest itself."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    offset = len(MAGIC) + DIGEST_BYTES
    while part := os.pread(fd, PART_BYTES, offset):
        digest.update(part)
        offset += len(part)
    return digest.digest()


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
