"""The JSON of a request: read within limits, and refused where parsers differ in what they make of
it (NaN, numbers beyond all bounds, a key twice, text that is no Unicode)."""

import asyncio
import json
import math
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from coordinator.api.errors import ApiError

MAX_DEPTH = 32
BODY_SECONDS = 30.0
MIN_BODY_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 16  # of the context: several times what text has


def max_body_bytes(n_context: int) -> int:
    """More than a request with a full context needs."""
    return max(MIN_BODY_BYTES, n_context * BODY_BYTES_PER_TOKEN)


async def read_json(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The body as an object; raises `ApiError`."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await _read(request, limit_bytes)
    except TimeoutError:
        raise ApiError(408, f"body: expected it within {BODY_SECONDS:.0f} s") from None
    except ClientDisconnect:
        raise ApiError(400, "body: the client left before its end") from None
    return parse_json(data)


async def _read(request: Request, limit_bytes: int) -> bytes:
    too_large = ApiError(
        413, f"body: expected at most {limit_bytes} bytes", headers={"Connection": "close"}
    )
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > limit_bytes:
        raise too_large
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limit_bytes:
            raise too_large
    return bytes(data)


def parse_json(data: bytes) -> dict[str, Any]:
    """An object and nothing else; raises `ApiError`."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_once,
        )
    except RecursionError:
        raise ApiError(400, f"body: expected a depth of at most {MAX_DEPTH}") from None
    except ValueError as error:  # also of text that is not UTF-8, and of integers beyond all bounds
        raise ApiError(
            400, f"body: expected JSON: {error}".encode("ascii", "replace").decode()
        ) from None
    if not isinstance(value, dict):
        raise ApiError(400, "body: expected a JSON object")
    _check(value)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _check(value: object) -> None:
    """Depth and text of all that is inside."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str):
                _check_text(item)
        if not inner:
            return
        level = inner
    raise ApiError(400, f"body: expected a depth of at most {MAX_DEPTH}")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, "body: expected Unicode text, found half of a surrogate pair") from None
