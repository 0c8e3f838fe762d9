"""Errors as clients of the OpenAI API know them, and the JSON that every answer is written in."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

JSON_TYPE = "application/json"


class ApiError(Exception):
    """A request that is not answered: one line for people, the rest for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The object that is sent."""
        return {
            "error": {
                "message": self.message,
                "type": KINDS.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}


def bad(param: str, expected: str, found: object) -> ApiError:
    """A parameter that is not what it should be."""
    return ApiError(400, f"{param}: expected {expected}, found {shown(found)}", param=param)


def shown(value: object) -> str:
    """A value from outside for an error: cut, and without letters that a terminal obeys."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def dumped(value: object) -> str:
    """JSON on one line; text stays readable."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer in JSON. A lone surrogate (never ours) becomes a question mark."""
    body = dumped(value).encode("utf-8", "replace")
    return Response(body, status, dict(headers or {}), JSON_TYPE)


def error_response(error: ApiError) -> Response:
    """The answer for an error."""
    return json_response(error.body(), error.status, error.headers)


async def on_api_error(_: Request, error: Exception) -> Response:
    """For Starlette."""
    assert isinstance(error, ApiError)
    return error_response(error)
