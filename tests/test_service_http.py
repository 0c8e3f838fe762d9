"""The service against clients that are no friends: limits, refusals, slow and hostile ones."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from arms import run_program
from running_program import HOST, free_port, wait_until
from running_service import RunningService, events, post

KEY = "a-secret-key"
CUT_SECONDS = 60.0  # when all slow heads are cut off at the latest; they may take ten
AS_FRIEND = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    flags = ("--parallel", "2", "--queue", "1", "--allow-origin", "http://page.example")
    with RunningService("--io-workers", "1", *flags) as run:
        yield run.wait_ready()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"another\n{KEY}\n")
    with RunningService("--io-workers", "1", "--api-key", str(keys)) as run:
        yield run.wait_ready()


@pytest.fixture(scope="module", autouse=True)
def crowd(service: RunningService) -> Iterator[tuple[float, list[socket.socket]]]:
    """Connections whose heads never end, there while other tests run."""
    started = time.monotonic()
    connections = [service.connect() for _ in range(256)]
    for connection in connections:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost:")
    yield started, connections
    for connection in connections:
        connection.close()


def answer_to(service: RunningService, data: bytes) -> bytes:
    """All that comes back for some bytes."""
    with service.connect() as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except ConnectionResetError:
            pass
        return found


# Bodies


BAD_BODIES = {
    "no json": b"{",
    "no object": b"[1]",
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": 1e999}',
    "huge integer": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep enough": b'{"prompt": ' + b"[" * 40 + b"]" * 40 + b"}",
    "twice": b'{"prompt": "a", "prompt": "b"}',
    "surrogate": b'{"prompt": "\\ud800"}',
    "not utf-8": b'{"prompt": "\xff"}',
    "no prompt": b"{}",
    "two prompts": b'{"prompt": ["a", "b"]}',
    "foreign id": b'{"prompt": [99999999]}',
    "negative id": b'{"prompt": [-1]}',
    "boolean": b'{"prompt": "a", "max_tokens": true}',
    "max_tokens": b'{"prompt": "a", "max_tokens": -1}',
    "too large": b'{"prompt": "a", "max_tokens": 9223372036854775808}',
    "temperature": b'{"prompt": "a", "temperature": 1e308}',
    "top_k": b'{"prompt": "a", "top_k": -2}',
    "seed": b'{"prompt": "a", "seed": 18446744073709551616}',
    "many stops": json.dumps({"prompt": "a", "stop": ["x"] * 10_000}).encode(),
    "empty stop": b'{"prompt": "a", "stop": ""}',
    "n": b'{"prompt": "a", "n": 1000000}',
    "logprobs": b'{"prompt": "a", "logprobs": 1000000}',
    "stream": b'{"prompt": "a", "stream": "yes"}',
    "options": b'{"prompt": "a", "stream_options": {"include_usage": true}}',
    "unknown": b'{"prompt": "a", "mirostat": 2}',
    "unknown null": b'{"prompt": "a", "mirostat": null}',
    "terminal": b'{"prompt": "a", "\\u001b[2J": 2}',
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_bad_body_is_refused(service: RunningService, body: bytes) -> None:
    status, _, found = service.ask("POST", "/v1/completions", body)
    assert status == 400
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["type"] == "invalid_request_error"
    assert found["error"]["message"].isprintable() and len(found["error"]["message"]) < 400


BAD_MESSAGES = {
    "none": [],
    "no list": "hello",
    "no object": ["hello"],
    "role": [{"role": "wizard", "content": "a"}],
    "tool": [{"role": "tool", "content": "a", "tool_call_id": "1"}],
    "content": [{"role": "user", "content": 5}],
    "no content": [{"role": "user"}],
    "image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    "calls": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
    "many": [{"role": "user", "content": "a"}] * 1025,
}


@pytest.mark.parametrize("messages", BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_bad_messages_are_refused(service: RunningService, messages: object) -> None:
    status, _, found = service.ask("POST", "/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert found["error"]["param"].startswith("messages")


def test_what_asks_for_nothing_is_accepted(service: RunningService) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {
        "model": "moe-demo-q4_k_m", "messages": [{"role": "user", "content": parts}],
        "max_tokens": 1, "n": 1, "logit_bias": {}, "tools": [], "user": "me", "stop": None,
        "response_format": {"type": "text"}, "top_k": -1, "seed": -1,
    }  # fmt: skip
    assert service.ask("POST", "/v1/chat/completions", body)[0] == 200


def test_a_body_over_the_limit(service: RunningService) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    told = answer_to(service, head + b"Content-Length: 999999999999\r\n\r\n{")
    assert told.startswith(b"HTTP/1.1 413 ")
    with service.connect() as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        try:
            for _ in range(100):
                connection.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it does not read all of it
        else:
            assert connection.recv(12) == b"HTTP/1.1 413"


# Heads


def test_a_head_over_the_limit(service: RunningService) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n"
    for head in (b"X: " + b"a" * 100_000, b"".join(b"X%d: a\r\n" % n for n in range(10_000))):
        told = answer_to(service, request % head)
        assert told[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"")


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\n\r\n",  # no Host
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",  # TLS
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
        b"Transfer-Encoding: gzip\r\n\r\n{}",
    ],
)
def test_broken_http(service: RunningService, data: bytes) -> None:
    told = answer_to(service, data)
    assert told[:10] in (b"HTTP/1.1 4", b"HTTP/1.1 5", b"")
    assert service.ask("GET", "/health")[0] == 200


def test_pipelined_requests_are_answered_in_order(service: RunningService) -> None:
    one = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    two = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    told = answer_to(service, one + two)
    assert told.count(b"HTTP/1.1 200") == 2
    assert told.index(b'"object":"list"') < told.index(b'"state"')


def test_paths_and_methods(service: RunningService) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405),
        ("GET", "/v1/models/other", 404), ("GET", "/../etc/passwd", 404), ("GET", "/page/x", 404),
    ):  # fmt: skip
        found = service.ask(method, path)
        assert found[0] == status, path
        assert "error" in found[2]


def test_a_crowd_of_slow_heads_keeps_nobody_out(service: RunningService) -> None:
    assert service.ask("GET", "/health")[0] == 200
    assert service.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1


# Who may ask


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:8080", 200), ("127.0.0.1:1", 200), ("[::1]:8080", 200),
        ("LocalHost", 200), ("evil.example", 403), ("localhost.evil.example", 403), ("", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)  # fmt: skip
def test_names_of_the_service(service: RunningService, host: str, status: int) -> None:
    assert service.ask("GET", "/v1/models", headers={"Host": host})[0] == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200), ("http://page.example", 200), ("http://evil.example", 403),
        ("null", 403), ("http://localhost:3000", 403), ("file://", 403),
    ],
)  # fmt: skip
def test_pages_whose_scripts_may_ask(service: RunningService, origin: str, status: int) -> None:
    headers = {"Host": "localhost", "Origin": origin}
    found = service.ask("GET", "/v1/models", headers=headers)
    assert found[0] == status
    allowed = found[1].get("access-control-allow-origin")
    assert allowed == (origin if "page" in origin else None)


def test_a_browser_asks_first(service: RunningService) -> None:
    headers = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    status, found, _ = service.ask("OPTIONS", "/v1/chat/completions", headers=headers)
    assert status == 204
    assert "authorization" in found["access-control-allow-headers"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (AS_FRIEND, 200), ({"Authorization": f"bearer {KEY}"}, 200), ({"x-api-key": KEY}, 200),
        ({}, 401), ({"Authorization": f"Bearer {KEY}x"}, 401), ({"Authorization": KEY}, 401),
        ({"Authorization": "Bearer " + "k" * 12_000}, 401), ({"Authorization": "Bearer "}, 401),
    ],
)  # fmt: skip
def test_keys(locked: RunningService, headers: dict[str, str], status: int) -> None:
    for method, path, body in (
        ("GET", "/v1/models", None), ("GET", "/status.json", None),
        ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("POST", "/tokenize", {"content": "a"}),
    ):  # fmt: skip
        assert locked.ask(method, path, body, headers)[0] == status
    assert locked.ask("GET", "/health")[0] == 200


def test_the_key_is_not_in_the_process_list(locked: RunningService) -> None:
    for pid in locked.alive():
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_others_are_not_served_by_accident(host: str) -> None:
    done = run_program("--host", host, "--port", str(free_port()))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("moe-coord: error: --host: expected --api-key")


def test_a_port_in_use() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        for flag, other in (("--port", "--metrics-port"), ("--metrics-port", "--port")):
            done = run_program(flag, str(port), other, str(free_port()))
            assert done.returncode == 2
            assert f"{flag}: " in done.stderr and str(port) in done.stderr
            assert len(done.stderr.splitlines()) == 1


# Load


def test_beyond_the_queue_clients_are_sent_away(service: RunningService) -> None:
    body = {"prompt": "Once", "max_tokens": 900, "stream": True, "seed": 1}
    streams = [service.open_stream("/v1/completions", body) for _ in range(3)]
    wait_until(lambda: service.status()["requests"]["queued"] == 1)
    status, headers, found = service.ask("POST", "/v1/completions", {"prompt": "a"})
    assert service.status()["requests"]["queued"] == 1  # told at once: none of them has ended yet
    assert (status, found["error"]["type"]) == (429, "rate_limit_error")
    assert 1 <= int(headers["retry-after"]) <= 60
    for stream in streams:
        stream.close()
    wait_until(lambda: service.status()["requests"]["running"] == 0)
    assert service.complete("a", max_tokens=1)


def test_a_reader_that_takes_nothing_holds_up_nobody(service: RunningService) -> None:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    with connection:
        connection.connect((HOST, service.port))
        body = {"prompt": "Once", "max_tokens": 900, "stream": True, "logprobs": 20, "seed": 1}
        connection.sendall(post("/v1/completions", body))
        wait_until(lambda: service.status()["requests"]["running"] == 1)
        answer = service.complete("a", max_tokens=20, temperature=0)
        assert answer["usage"]["completion_tokens"] == 20


def test_progress_is_told_while_a_request_waits(service: RunningService) -> None:
    """Comments come every few seconds."""
    body = {"prompt": "Once upon a time", "max_tokens": 1000, "stream": True, "seed": 2}
    streams = [service.open_stream("/v1/completions", body) for _ in range(2)]
    third = service.open_stream("/v1/completions", body)
    try:
        assert next(events(third)).startswith((": waiting", "{"))
    finally:
        for stream in (*streams, third):
            stream.close()
    wait_until(lambda: service.status()["requests"]["running"] == 0)


def test_counts_of_answers(service: RunningService) -> None:
    service.complete("a", max_tokens=1)
    service.ask("GET", "/nothing")

    def are_counted() -> bool:
        text = service.ask("GET", "/metrics/http", port=service.metrics_port)[2]
        return (
            'moe_coord_http_requests_total{route="other",status="404"}' in text
            and "moe_coord_http_first_token_seconds_bucket" in text
        )

    wait_until(are_counted)


def test_slow_heads_are_cut_off(crowd: tuple[float, list[socket.socket]]) -> None:
    started, connections = crowd
    for connection in connections:
        connection.settimeout(max(0.1, started + CUT_SECONDS - time.monotonic()))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
