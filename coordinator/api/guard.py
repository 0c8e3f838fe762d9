"""Who may ask: names under which the service is called, pages whose scripts may call it, keys.

A page of a stranger can make a browser send requests to this machine, and can give its own name
this machine's address (DNS rebinding). So the Host must be an address, localhost or a name that
was allowed, and an Origin must be our own page or one that was allowed.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping

from coordinator.api.errors import ApiError
from coordinator.api.settings import HttpSettings

MAX_KEY_BYTES = 1024
MAX_HEAD_BYTES = 16 * 1024
OPEN_PATHS = ("/health", "/v1/health")  # for probes, which have no key


class Guard:
    """The rules of one service. Raises `ApiError` for a request that breaks one."""

    def __init__(self, settings: HttpSettings) -> None:
        self._hosts = {name.lower() for name in (*settings.allowed_hosts, "localhost")}
        self._origins = {origin.rstrip("/").lower() for origin in settings.allowed_origins}
        self._keys = [_digest(key.encode()) for key in settings.api_keys]

    def check_size(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        """All headers together. The server stops reading at a limit, but only between two parts."""
        if sum(len(name) + len(value) for name, value in raw) > MAX_HEAD_BYTES:
            raise ApiError(431, f"headers: expected at most {MAX_HEAD_BYTES} bytes")

    def check_host(self, host: str) -> None:
        """The header Host."""
        name = _name_of(host)
        if name in self._hosts or _is_address(name):
            return
        raise ApiError(
            403,
            "Host: expected localhost, an address, or a name given with --allow-host; found "
            f"{name!a:.60}",
            code="host_not_allowed",
        )

    def check_origin(self, origin: str | None, host: str) -> None:
        """The header Origin, which browsers send."""
        if origin is None or self.is_listed(origin):
            return
        scheme, _, rest = origin.partition("://")
        if scheme.lower() in ("http", "https") and rest.lower() == host.lower():
            return
        raise ApiError(
            403,
            "Origin: expected the service's own page, or one given with --allow-origin; found "
            f"{origin!a:.60}",
            code="origin_not_allowed",
        )

    def is_listed(self, origin: str | None) -> bool:
        """Whether scripts of this page were allowed to use the API."""
        return origin is not None and origin.lower() in self._origins

    def check_key(self, path: str, headers: Mapping[str, str]) -> None:
        """The header Authorization, or x-api-key; static files and probes need none."""
        if not self._keys or not needs_key(path):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        data = key.strip().encode("utf-8", "replace")
        # digests are of one length, and all are compared: the time tells nothing
        digest = _digest(data[:MAX_KEY_BYTES] if len(data) <= MAX_KEY_BYTES else b"")
        if not any_equal(digest, self._keys):
            raise ApiError(
                401,
                "expected a key of this service as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def needs_key(path: str) -> bool:
    """Whether a path tells or does something: the API and the status, but no probe and no file."""
    if path in OPEN_PATHS:
        return False
    return path.startswith("/v1/") or path in ("/status.json", "/tokenize", "/detokenize")


def any_equal(digest: bytes, known: Iterable[bytes]) -> bool:
    """Compare with all, always."""
    found = False
    for other in known:
        found |= hmac.compare_digest(digest, other)
    return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host.partition("]")[0].lstrip("[").lower()
    return host.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
