"""What a child says of its start in its `Ready`: a JSON object."""

import json

from shm.codec import MessageError
from shm.messages import Ready


def detail_of(ready: Ready) -> dict[str, object]:
    """The object. Raises `MessageError` for anything else."""
    try:
        found = json.loads(ready.detail)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"message: expected a Ready with JSON, found {error}") from error
    if not isinstance(found, dict):
        raise MessageError(f"message: expected a Ready with an object, found {found!r}")
    return found
