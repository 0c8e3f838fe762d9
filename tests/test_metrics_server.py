"""The HTTP server of the metrics: its answers, its bounds, and that it never holds up the loop."""

import contextlib
import gc
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from arms import PROGRAM, run_program
from gguf_builder import tiny_model
from running_program import free_port
from scraped_run import ScrapedRun, figure, scraped_run

from coordinator.command.flag_values import ConfigError
from coordinator.metrics.exposition import Exposition
from coordinator.metrics.server import (
    CONNECTION_SECONDS,
    HOST,
    MAX_CONNECTIONS,
    STOP_SECONDS,
    SWITCH_SECONDS,
    listen,
    serving,
)


@dataclass
class Served:
    """A server and the run it shows."""

    run: ScrapedRun
    port: int

    def get(self, path: str, method: str = "GET") -> tuple[int, str, bytes]:
        """Status, content type and body."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.headers["Content-Type"], answer.read()

    def connect(self) -> socket.socket:
        """A connection that has not asked for anything."""
        return socket.create_connection((HOST, self.port), timeout=10)


def open_descriptors() -> dict[str, str]:
    """What each descriptor of this process is."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found[link.name] = str(link.readlink())
    return found


@contextlib.contextmanager
def service(connection_seconds: float = CONNECTION_SECONDS) -> Iterator[Served]:
    run = scraped_run()
    with listen(0) as listener:
        # little room in the kernel: what is not read soon stays with the server
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        port = listener.getsockname()[1]
        with serving(listener, Exposition(run.view), connection_seconds):
            yield Served(run, port)


@pytest.fixture
def served() -> Iterator[Served]:
    with service() as made:
        yield made


# Answers


def test_pages(served: Served) -> None:
    served.run.totals.prompt_tokens = 12
    status, content_type, body = served.get("/metrics/coordinator")
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert figure(body, "moe_coord_tokens_total", kind="prompt") == 12
    status, content_type, body = served.get("/metrics")
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    labels = {"process": "coordinator", "kind": "prompt"}
    assert figure(body, "moe_coord_tokens_total", **labels) == 12


def test_targets(served: Served) -> None:
    status, content_type, body = served.get("/targets")
    assert (status, content_type) == (200, "application/json")
    assert json.loads(body) == [
        {
            "targets": [f"127.0.0.1:{served.port}"],
            "labels": {"__metrics_path__": f"/metrics/{name}", "process": name},
        }
        for name in ("coordinator", "io0", "io1", "compute")
    ]


def test_a_process_that_is_down(served: Served) -> None:
    served.run.lives["io1"] = None
    assert served.get("/metrics/io1")[0] == 503
    assert served.get("/metrics/io0")[0] == 200
    assert served.get("/metrics")[0] == 200
    assert "/metrics/io1" in served.get("/targets")[2].decode()


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metrics/io9", "/metrics/io0/", "/x"])
def test_other_paths(served: Served, path: str) -> None:
    status, _, body = served.get(path)
    assert (status, body) == (404, b"try /metrics or /targets\n")


def test_a_query_is_ignored(served: Served) -> None:
    assert served.get("/metrics?name[]=x")[0] == 200


@pytest.mark.parametrize("method", ["POST", "HEAD", "DELETE"])
def test_other_methods(served: Served, method: str) -> None:
    assert served.get("/metrics", method)[0] == 405


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2\r\n\r\n", b"400"),
        (b"\x00\xff\xfe\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", None),  # too long: no answer
        (b"GET /metrics HTTP/1.1\r\n", None),  # never finished
    ],
)
def test_raw_requests(served: Served, sent: bytes, status: bytes | None) -> None:
    with served.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    assert answer.partition(b" ")[2][:3] == (status or b"")
    assert served.get("/targets")[0] == 200


def test_a_fault_of_ours_is_told(served: Served) -> None:
    served.run.totals.requests = None  # type: ignore[assignment]
    status, _, body = served.get("/metrics/coordinator")
    assert status == 500
    assert body.startswith(b"AttributeError: ")
    assert served.get("/metrics/io0")[0] == 200


# Bounds


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (b"Host: moe-coord:9400\r\n", "moe-coord:9400"),
        (b"hOST:[::1]:9400 \r\n", "[::1]:9400"),
        (b"X-Host: other\r\n", None),
        (b'Host: a"b\r\n', None),
        (b"", None),
    ],
)
def test_targets_have_the_address_that_was_asked(
    served: Served, host: bytes, expected: str | None
) -> None:
    with served.connect() as connection:
        connection.sendall(b"GET /targets HTTP/1.1\r\n" + host + b"\r\n")
        body = connection.makefile("rb").read().partition(b"\r\n\r\n")[2]
    found = {address for item in json.loads(body) for address in item["targets"]}
    assert found == {expected or f"127.0.0.1:{served.port}"}


def test_another_address_can_be_chosen() -> None:
    with listen(0, "0.0.0.0") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    with pytest.raises(ConfigError, match=r"--metrics-port: expected a port of 192\.0\.2\.1 "):
        listen(9400, "192.0.2.1")


def test_a_used_port_is_refused_by_its_number() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--metrics-port: .* found {port}: .*in use"):
            listen(port)


def test_a_port_with_lingering_connections_can_be_had_again() -> None:
    port = free_port()
    for _ in range(2):
        run = scraped_run()
        with (
            listen(port) as listener,
            serving(listener, Exposition(run.view)),
            Served(run, port).connect() as connection,
        ):
            connection.sendall(b"GET /targets HTTP/1.1\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_only_the_loopback_address_listens(served: Served) -> None:
    hexadecimal = f":{served.port:04X} "
    lines = Path("/proc/net/tcp").read_text().splitlines()
    ours = [line.split()[1] for line in lines if hexadecimal in line and " 0A " in line]
    assert ours == [f"0100007F:{served.port:04X}"]


def test_what_it_leaves_behind() -> None:
    gc.collect()  # what earlier tests left is not closed in between
    before = sys.getswitchinterval(), threading.active_count(), open_descriptors()
    with listen(0) as listener:
        served = Served(scraped_run(), listener.getsockname()[1])
        with serving(listener, Exposition(served.run.view)):
            assert sys.getswitchinterval() == SWITCH_SECONDS
            hung = [served.connect() for _ in range(3)]
            served.get("/metrics")
            started = time.monotonic()
        assert time.monotonic() - started < STOP_SECONDS
    for connection in hung:
        connection.close()
    after = sys.getswitchinterval(), threading.active_count(), open_descriptors()
    assert after == before


def test_signals_stay_with_the_main_thread(served: Served) -> None:
    served.get("/targets")
    (thread,) = [t for t in threading.enumerate() if t.name == "metrics"]
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        assert blocked >> (number - 1) & 1


def test_hung_connections_are_dropped() -> None:
    with service(connection_seconds=0.3) as served:
        started = time.monotonic()
        with served.connect() as silent, served.connect() as half:
            half.sendall(b"GET /metrics HTTP/1.1\r\n")
            for connection in (silent, half):
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        assert 0.1 < time.monotonic() - started < CONNECTION_SECONDS


def slow_reader(served: Served, wait_seconds: float) -> tuple[int, int]:
    """Bytes that one with little room gets who waits before it reads, and bytes of the answer."""
    with served.connect() as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        whole = len(connection.makefile("rb").read())
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect((HOST, served.port))
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        time.sleep(wait_seconds)
        taken = 0
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                taken += len(part)
    return taken, whole


def test_one_who_does_not_take_the_answer_is_dropped() -> None:
    with service(connection_seconds=1.0) as served:  # enough for the one that is quick
        taken, whole = slow_reader(served, 3.0)
        assert 0 < taken < whole - 1000


def test_one_who_takes_the_answer_slowly_gets_all_of_it(served: Served) -> None:
    taken, whole = slow_reader(served, 0.5)
    assert abs(taken - whole) < 1000  # figures may have grown a digit


def test_beyond_the_limit_connections_are_closed_at_once() -> None:
    with service(connection_seconds=60) as served, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(served.connect()) for _ in range(MAX_CONNECTIONS)]
        extra = stack.enter_context(served.connect())
        with contextlib.suppress(ConnectionResetError):
            assert extra.recv(1) == b""
        crowd.pop().close()
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                if served.get("/targets")[0] == 200:
                    break
            assert time.monotonic() < deadline, "a place that came free is not given to another"


# The loop is not held up


N_SCRAPES = 10
MAX_TURN_SECONDS = 0.1  # of something that takes 0.1 ms
MAX_SLOW_TURNS = 2  # when the machine itself stood still; a scrape that holds up does it each time
N_SCRAPERS, N_HUNG = 40, 10  # fewer than may connect: one that has ended is counted for a moment
CROWD = f"""
import sys, threading, time, urllib.request
answers = []
def scrape():
    for _ in range({N_SCRAPES}):
        with urllib.request.urlopen(f"http://127.0.0.1:{{sys.argv[1]}}/metrics") as answer:
            answers.append(len(answer.read()))
        time.sleep(0.05)
threads = [threading.Thread(target=scrape) for _ in range({N_SCRAPERS})]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(answers))
"""


def seconds_of_turns(stop: threading.Event) -> list[float]:
    """A loop that handles something short again and again, as the coordinator's does."""
    seconds = []
    while not stop.is_set():
        started = time.perf_counter()
        sum(range(2000))
        seconds.append(time.perf_counter() - started)
        time.sleep(0.0005)
    return seconds


@pytest.mark.alone
def test_scrapers_do_not_hold_up_the_loop(served: Served) -> None:
    """Many scrapers that ask again and again, and some that hang, while the loop turns."""
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        for _ in range(N_HUNG):
            stack.enter_context(served.connect()).sendall(b"GET /metrics HTTP/1.1\r\n")
        crowd = subprocess.Popen(
            [sys.executable, "-c", CROWD, str(served.port)], stdout=subprocess.PIPE, text=True
        )
        timer = threading.Timer(3.0, stop.set)
        timer.start()
        seconds = seconds_of_turns(stop)
        timer.join()
        n_answers = int(crowd.communicate(timeout=60)[0])
    assert n_answers == N_SCRAPERS * N_SCRAPES
    slow = [each for each in seconds if each >= MAX_TURN_SECONDS]
    assert len(slow) <= MAX_SLOW_TURNS, slow


# The command


def test_the_command_refuses_a_used_port_before_it_starts_a_process(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m.gguf")
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        done = run_program("--model", str(model), "--tokens", "1", "--metrics-port", str(port))
    assert done.returncode == 2
    assert done.stdout == ""
    error = done.stderr.splitlines()[-1]
    assert error.startswith("moe-coord: error: --metrics-port: expected a port of 127.0.0.1")
    assert f"found {port}: Address already in use" in error
    assert "kernels:" not in done.stderr  # what compute says when it is up


def test_the_command_refuses_a_single_process(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m.gguf")
    port = str(free_port())
    done = run_program(
        "--model", str(model), "--tokens", "1", "--single-process", "--metrics-port", port
    )
    assert done.returncode == 2
    assert "--metrics-port: " in done.stderr
    assert "--single-process" in done.stderr


def test_the_command_serves_while_it_runs(tmp_path: Path) -> None:
    model, port = tiny_model(tmp_path / "m.gguf"), free_port()
    command = [*PROGRAM, "--model", str(model), "--metrics-port", str(port)]
    command += ["--port", str(free_port())]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    served = Served(scraped_run(), port)
    try:
        assert process.stderr is not None
        lines: list[str] = []
        for line in iter(process.stderr.readline, ""):
            lines.append(line)
            if line.startswith("ready:"):
                break
        assert f"metrics: http://127.0.0.1:{port}/metrics\n" in lines
        for name in ("coordinator", "io0", "compute", "http"):
            status, _, body = served.get(f"/metrics/{name}")
            assert status == 200
            assert figure(body, "moe_coord_process_resident_bytes") > 1_000_000
        coordinator = served.get("/metrics/coordinator")[2]
        accounted = figure(coordinator, "moe_coord_accounted_bytes")
        assert 1_000_000 < accounted < figure(coordinator, "moe_coord_budget_limit_bytes")
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 143
    with pytest.raises(ConnectionRefusedError):
        served.connect()
