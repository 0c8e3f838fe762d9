"""What the HTTP process is told in `Welcome`: the model's names, and who may ask for what.

The listening socket is bound by the coordinator and inherited, so that connections wait while this
process is started again.
"""

from dataclasses import dataclass

from shm.codec import MessageError, decoder_for, pack, unpack

_TAG = "HttpSettings"


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Of one HTTP process."""

    listener_fd: int
    model_path: str
    fingerprint: str  # of the model's header: the file may have been replaced since
    names: tuple[str, ...]  # of the model in the API, the one that is shown first
    version: str
    n_context: int  # tokens of the longest sequence
    vocabulary_size: int
    parallel: int  # answers computed at the same time
    queue: int  # requests that may wait
    api_keys: tuple[str, ...]  # empty: none is asked for
    allowed_hosts: tuple[str, ...]  # beside localhost and addresses
    allowed_origins: tuple[str, ...]  # beside the own page


def encode_settings(settings: HttpSettings) -> bytes:
    """The settings as they travel in `Welcome`."""
    return pack(_TAG, settings)


def decode_settings(data: bytes) -> HttpSettings:
    """Undo `encode_settings`; raises `MessageError`."""
    tag, fields = unpack(data)
    if tag != _TAG:
        raise MessageError(f"settings: expected {_TAG}, found {tag!r:.40}")
    settings: HttpSettings = decoder_for(HttpSettings)(fields)
    return settings
