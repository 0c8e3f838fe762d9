"""What an I/O worker is told in `Welcome`: the model files and how to read them.

The descriptors are those that `ChildArguments` announced; the pool's layout is there too.
"""

from dataclasses import dataclass

from io_worker.probe import READER_NAMES
from io_worker.reader import ModelFile, descriptors
from shm.codec import MessageError, decoder_for, pack, unpack

MAX_QUEUE_DEPTH = 256  # threads of one worker; disks seen gain nothing beyond 32
_TAG = "IoSettings"


@dataclass(frozen=True, slots=True)
class IoSettings:
    """`queue_depth` ranges are read at once; `reader` is one of `READER_NAMES`."""

    files: tuple[ModelFile, ...]
    reader: str
    queue_depth: int
    drop_cache: bool  # buffered reads let go of their pages: the pool is the only cache


def encode_settings(settings: IoSettings) -> bytes:
    """The settings as they travel in `Welcome`."""
    return pack(_TAG, settings)


def decode_settings(data: bytes, inherited_fds: tuple[int, ...]) -> IoSettings:
    """Undo `encode_settings` and check every figure; raises `MessageError`."""
    tag, fields = unpack(data)
    if tag != _TAG:
        raise MessageError(f"settings: expected {_TAG}, found {tag!r:.40}")
    settings: IoSettings = decoder_for(IoSettings)(fields)
    if settings.reader not in READER_NAMES:
        known = ", ".join(READER_NAMES)
        raise MessageError(f"settings: expected a reader of {known}, found {settings.reader!r:.40}")
    if not 1 <= settings.queue_depth <= MAX_QUEUE_DEPTH:
        raise MessageError(
            f"settings: expected a queue depth of 1 to {MAX_QUEUE_DEPTH}, "
            f"found {settings.queue_depth}"
        )
    strangers = set(descriptors(settings.files)) - set(inherited_fds)
    if strangers:
        raise MessageError(f"settings: descriptors {sorted(strangers)} were not inherited")
    return settings
