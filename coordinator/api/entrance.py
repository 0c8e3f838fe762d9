"""The door of the application: who may come in, what is counted, what an answer always carries."""

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.counts import HttpCounts
from coordinator.api.errors import ApiError, error_response
from coordinator.api.guard import Guard

ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/health",
    "/status.json", "/",
)  # fmt: skip
ALWAYS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'",
    ),
    (b"referrer-policy", b"no-referrer"),
]
PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key"),
    (b"access-control-max-age", b"600"),
]


def route_of(path: str, known: Iterable[str] = ROUTES) -> str:
    """One of a fixed set of names, whatever is asked for: it is a label."""
    if path in known:
        return path
    return "/v1/models" if path.startswith("/v1/models/") else "other"


class Entrance:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, guard: Guard, counts: HttpCounts) -> None:
        self._app = app
        self._guard = guard
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        more = list(ALWAYS)
        status = 499  # as nginx counts a client that left before its answer

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        self._counts.in_flight += 1
        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await error_response(refusal)(scope, receive, counted)
                return
            if origin is not None and self._guard.is_listed(origin):
                more += [(b"access-control-allow-origin", origin.encode()), (b"vary", b"Origin")]
                if scope["method"] == "OPTIONS":
                    more += PREFLIGHT
                    await counted({"type": "http.response.start", "status": 204, "headers": []})
                    await counted({"type": "http.response.body", "body": b""})
                    return
            await self._app(scope, receive, counted)
        finally:
            self._counts.in_flight -= 1
            self._counts.answered(route_of(scope["path"]), status)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        try:
            self._guard.check_size(headers.raw)
            self._guard.check_host(host)
            self._guard.check_origin(headers.get("origin"), host)
            if scope["method"] != "OPTIONS":  # browsers send it without the key
                self._guard.check_key(scope["path"], headers)
        except ApiError as error:
            return error
        return None
