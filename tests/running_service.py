"""The service as a running process, and clients without a library: sockets and http.client."""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

from running_program import HOST, RunningProgram, port_of, reserved_port, wait_until

TIMEOUT_SECONDS = 60.0
Answer = tuple[int, dict[str, str], Any]  # status, headers, JSON or text


class RunningService(RunningProgram):
    """`moe-coord` without a prompt, on ports of its own."""

    def __init__(self, *flags: str, **options: Any) -> None:
        self._reserved = reserved_port(), reserved_port()
        self.port, self.metrics_port = map(port_of, self._reserved)
        super().__init__(
            "--port", str(self.port), "--metrics-port", str(self.metrics_port), *flags, **options
        )

    def __exit__(self, *about: object) -> None:
        super().__exit__(*about)
        for reserved in self._reserved:
            reserved.close()

    def wait_ready(self) -> "RunningService":
        """Until it answers."""
        self.wait_for("event=state state=ready")
        wait_until(lambda: self.ask("GET", "/health")[0] == 200)  # a message later
        return self

    @property
    def url(self) -> str:
        """Of the API."""
        return f"http://{HOST}:{self.port}/v1"

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        port: int | None = None,
    ) -> Answer:
        """One request; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection(HOST, port or self.port, timeout=TIMEOUT_SECONDS)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            text = answer.read().decode()
            found = {name.lower(): value for name, value in answer.headers.items()}
            is_json = found.get("content-type", "").startswith("application/json")
            return answer.status, found, json.loads(text) if is_json else text

    def complete(self, prompt: str | list[int], **parameters: Any) -> dict[str, Any]:
        """A completion that must succeed; drawn alike in every run: it may end early by chance."""
        asked = {"prompt": prompt, "seed": 1, **parameters}
        status, _, body = self.ask("POST", "/v1/completions", asked)
        assert status == 200, body
        found: dict[str, Any] = body
        return found

    def status(self) -> dict[str, Any]:
        """What /status.json says."""
        found: dict[str, Any] = self.ask("GET", "/status.json")[2]
        return found

    def connect(self) -> socket.socket:
        """A connection that has sent nothing."""
        return socket.create_connection((HOST, self.port), timeout=TIMEOUT_SECONDS)

    def open_stream(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection on which a request was sent, drawn alike in every run; nothing read yet."""
        connection = self.connect()
        connection.sendall(post(path, {"seed": 1, **body}))
        return connection


def post(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def events(connection: socket.socket) -> Iterator[str]:
    """What a stream says, event by event: JSON texts, comments with their colon, `[DONE]`."""
    text = ""
    while True:
        part = connection.recv(65536)
        if not part:
            return
        text += part.decode()
        lines = text.split("\n")
        text = lines.pop()
        for line in lines:
            line = line.strip("\r")
            if line.startswith(":"):
                yield line
            if line.startswith("data: "):
                yield line.removeprefix("data: ")
                if line == "data: [DONE]":
                    return
