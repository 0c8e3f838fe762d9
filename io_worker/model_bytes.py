"""Reading an untrusted file from its start, with every length checked before it is believed.

Owns the one exception for a bad model file, the opening of a path without blocking, and the cursor
over the file's first bytes. Knows nothing of GGUF beyond its integers and strings (little-endian;
a string is a u64 length and UTF-8 bytes).

Rules to keep: every fault is a `ModelFormatError`; nothing is allocated for a claimed length before
it is compared with the bytes left; text from the file enters a message escaped. Reads are `pread`
and not a mapping, so that a file truncated meanwhile is an error and no SIGBUS.
"""

import contextlib
import errno
import os
import stat
import struct

MAX_METADATA_BYTES = 256 << 20  # the whole header; real ones are below 20 MiB
MAX_STRING_BYTES = 16 << 20  # the longest real value is a chat template of some 10 KiB
FIRST_READ_BYTES = 256 << 10  # then doubled: a large vocabulary takes six reads

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_SHOWN = 120  # characters of file text in one message


def escaped(text: str) -> str:
    """Text from outside made safe for one line of a terminal or log; nothing is cut off."""
    if text.isprintable():
        return text
    return "".join(
        [c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text]
    )


def excerpt(text: str) -> str:
    """The start of a text from outside, escaped, for a message that must stay short."""
    return escaped(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")


class ModelFormatError(Exception):
    """A model file is not what it must be; `str()` is one line naming file, field, fault, byte."""

    def __init__(self, path: str, field: str, text: str, byte_offset: int | None = None) -> None:
        super().__init__(path, field, text, byte_offset)
        self.path, self.field, self.text, self.byte_offset = path, field, text, byte_offset

    def __str__(self) -> str:
        where = "" if self.byte_offset is None else f" (byte {self.byte_offset})"
        return f"{escaped(self.path)}: {excerpt(self.field)}: {escaped(self.text)}{where}"


def open_regular(path: str) -> int:
    """Open for reading without ever blocking (a FIFO would) and refuse all but regular files."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        reason = error.strerror or errno.errorcode.get(error.errno or 0, "unknown error")
        raise ModelFormatError(path, "file", f"expected a GGUF file, found: {reason}") from error
    except ValueError as error:  # a NUL or a lone surrogate in the path
        raise ModelFormatError(path, "file", f"expected a path, found: {error}") from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        with contextlib.suppress(OSError):  # no read-ahead: it would bring in a megabyte of weights
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor
    os.close(descriptor)
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    raise ModelFormatError(
        path, "file", f"expected a regular file, found {kind}; give the path of a .gguf file"
    )


class Cursor:
    """A position in the file and the bytes read so far; every read is checked against the end."""

    __slots__ = ("buffer", "descriptor", "file_bytes", "path", "position")

    def __init__(self, path: str, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self.file_bytes = os.fstat(descriptor).st_size
        self.buffer = b""
        self.position = 0

    @property
    def bytes_left(self) -> int:
        return self.file_bytes - self.position

    def error(self, field: str, text: str, at: int | None = None) -> ModelFormatError:
        return ModelFormatError(self.path, field, text, self.position if at is None else at)

    def need(self, n_bytes: int, field: str) -> None:
        """Make sure the next `n_bytes` are in the buffer."""
        stop = self.position + n_bytes
        if stop <= len(self.buffer):
            return
        if stop > self.file_bytes:
            raise self.error(
                field, f"expected {n_bytes} bytes, found {self.bytes_left} before the file ends"
            )
        if stop > MAX_METADATA_BYTES:
            raise self.error(field, f"expected a header of at most {MAX_METADATA_BYTES} bytes")
        pieces, have = [self.buffer], len(self.buffer)
        want = min(max(stop, 2 * have, FIRST_READ_BYTES), self.file_bytes, MAX_METADATA_BYTES)
        while have < want:
            try:
                piece = os.pread(self.descriptor, want - have, have)
            except OSError as error:
                raise self.error(
                    field, f"expected to read, found: {error.strerror}", have
                ) from error
            if not piece:
                raise self.error(field, f"expected {want} bytes, found {have}: file shrank", have)
            pieces.append(piece)
            have += len(piece)
        self.buffer = b"".join(pieces)

    def u32(self, field: str) -> int:
        self.need(4, field)
        value: int = _U32.unpack_from(self.buffer, self.position)[0]
        self.position += 4
        return value

    def u64(self, field: str) -> int:
        self.need(8, field)
        value: int = _U64.unpack_from(self.buffer, self.position)[0]
        self.position += 8
        return value

    def count(self, field: str, maximum: int, min_item_bytes: int) -> int:
        """A u64 number of items that, at `min_item_bytes` each, must fit the bytes left."""
        start = self.position
        count = self.u64(field)
        if count > maximum:
            raise self.error(field, f"expected at most {maximum}, found {count}", start)
        if count * min_item_bytes > self.bytes_left:
            raise self.error(
                field, f"found {count}, which do not fit the {self.bytes_left} bytes left", start
            )
        return count

    def string(self, field: str, max_bytes: int = MAX_STRING_BYTES) -> str:
        start = self.position
        length = self.u64(field)
        if length > max_bytes:
            raise self.error(
                field, f"expected a string of at most {max_bytes} bytes, found {length}", start
            )
        self.need(length, field)
        raw = self.buffer[self.position : self.position + length]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            at = self.position + error.start
            raise self.error(
                field, f"expected UTF-8, found byte 0x{raw[error.start]:02x}", at
            ) from error
        self.position += length
        return text

    def label(self, field: str, max_bytes: int) -> str:
        """A key or a tensor name: not empty, and printable, as it goes into messages and tables."""
        start = self.position
        text = self.string(field, max_bytes)
        if not text or not text.isprintable():
            found = f'"{excerpt(text)}"' if text else "an empty one"
            raise self.error(field, f"expected printable text, found {found}", start)
        return text
