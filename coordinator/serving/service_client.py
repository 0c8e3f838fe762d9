"""Talks to a running service over HTTP, as any client would. Knows nothing of the engine."""

import contextlib
import http.client
import json
import socket
import urllib.parse
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONNECT_SECONDS = 10.0
STREAM_SECONDS = 600.0  # between two lines of a stream: prompts are commented on each second
MAX_ERROR_BYTES = 64 * 1024
LOST = (OSError, http.client.HTTPException)


class ServiceError(Exception):
    """The service cannot be reached, or refuses: one line, and its code for it if it has one."""

    def __init__(self, text: str, code: str | None = None) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing was drawn yet. `total` 0: the request waits for its turn."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Text:
    """The answer goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is over. `timings` as the service sends them."""

    reason: str
    timings: Mapping[str, Any]


Event = Waiting | Text | Finished


def key_of(given: str | None) -> str | None:
    """The key of `--api-key`: the first line of the file of that name if there is one."""
    if given is None:
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError, IndexError):
        return Path(given).read_text().splitlines()[0].strip()
    return given


class ServiceClient:
    """One service. Each call has a connection of its own."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        self._parts = urllib.parse.urlsplit(url)
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def status(self) -> dict[str, Any]:
        """GET /status.json; raises `ServiceError`."""
        with self._asked("GET", "/status.json", None, CONNECT_SECONDS) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def chat(
        self, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, object]
    ) -> Generator[Event, None, None]:
        """POST /v1/chat/completions as a stream; closing it cancels. Raises `ServiceError`."""
        body = json.dumps({"messages": list(messages), "stream": True, **parameters})
        with self._asked("POST", "/v1/chat/completions", body, STREAM_SECONDS) as answer:
            for line in answer:
                yield from _events(line.decode("utf-8", "replace").rstrip("\n"))

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, body: str | None, timeout_seconds: float
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request that was not refused."""
        kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        try:
            connection = kind[self._parts.scheme](self._parts.netloc, timeout=timeout_seconds)
            with contextlib.closing(connection):
                connection.request(method, self._parts.path + path, body, self._headers)
                answer = connection.getresponse()
                if answer.status != http.client.OK:
                    raise _refusal(self.url, answer)
                yield answer
        except (*LOST, ValueError) as error:
            raise ServiceError(
                f"{self.url}: expected a running service, found {_fault(error)}; start one with "
                "`moe-coord`, or give another --url"
            ) from error


def _events(line: str) -> Iterator[Event]:
    """What one line of a stream says."""
    if line.startswith(":"):
        numbers = [int(word) for word in line.split() if word.isdecimal()]
        yield Waiting(numbers[0], numbers[1]) if len(numbers) == 2 else Waiting(0, 0)
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise ServiceError(str(event["error"].get("message", "unknown error")))
    for choice in event.get("choices", []):
        piece = choice["delta"].get("content")
        if piece:
            yield Text(piece)
        if choice.get("finish_reason"):
            yield Finished(choice["finish_reason"], event.get("timings", {}))


def _refusal(url: str, answer: http.client.HTTPResponse) -> ServiceError:
    """Why, in the service's words."""
    text, code = answer.reason, None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(answer.read(MAX_ERROR_BYTES))["error"]
        text, code = str(error["message"]), str(error["code"])
    advice = "; give --api-key" if answer.status == http.client.UNAUTHORIZED else ""
    return ServiceError(f"{url}: {answer.status}: {text}{advice}", code)


def _fault(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"{type(error).__name__}: {error}"
