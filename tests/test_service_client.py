"""`moe-coord top` and `moe-coord chat` against a real service, through pipes and on a terminal."""

import os
import pty
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from arms import PROGRAM, run_program
from running_program import RunningProgram, free_port

from coordinator.command.flag_values import ConfigError
from coordinator.command.line import parse
from coordinator.serving.service_client import (
    Finished,
    ServiceClient,
    ServiceError,
    Text,
    key_of,
)
from coordinator.serving.terminal_chat import printable

WAIT_SECONDS = 60.0
ASKED = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    flags = ("--port", str(port), "--metrics-port", "0", "--api-key", "right", "--pool", "40%")
    with RunningProgram(*flags) as program:
        program.wait_for("ready: ")
        yield f"http://127.0.0.1:{port}"


# The client


def test_a_chat_streams(url: str) -> None:
    parameters = {"max_tokens": 12, "temperature": 0, "seed": 1}
    events = list(ServiceClient(url, "right").chat(ASKED, parameters))
    text = "".join(event.text for event in events if isinstance(event, Text))
    last = events[-1]
    assert text and isinstance(last, Finished)
    assert (last.reason, last.timings["predicted_n"]) == ("length", 12)


def test_a_chat_that_is_closed_is_cancelled(url: str) -> None:
    client = ServiceClient(url, "right")
    events = client.chat(ASKED, {"max_tokens": 900, "seed": 1})
    while not isinstance(next(events), Text):
        pass
    assert client.status()["requests"]["running"] == 1
    events.close()
    deadline = time.monotonic() + WAIT_SECONDS
    while client.status()["requests"]["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("key", "parameters", "error"),
    [
        ("wrong", {}, "401: expected a key .*; give --api-key"),
        (None, {}, "401: expected a key .*; give --api-key"),
        ("right", {"temperature": 900}, "400: temperature: expected "),
        ("right", {"max_tokens": 0}, "400: max_tokens: expected "),
    ],
)
def test_refusals(url: str, key: str | None, parameters: dict[str, object], error: str) -> None:
    with pytest.raises(ServiceError, match=f"^{url}: {error}"):
        list(ServiceClient(url, key).chat([{"role": "user", "content": "x"}], parameters))


def test_nobody_is_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServiceError, match="expected a running service, found connection refused"):
        ServiceClient(url, None).status()


def test_something_else_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.settimeout(WAIT_SECONDS)
        client = subprocess.Popen(
            [*PROGRAM, "top", "--once", "--url", url], stderr=subprocess.PIPE, text=True
        )
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"220 mail.example ready\r\n")
        assert "found BadStatusLine" in client.communicate(timeout=WAIT_SECONDS)[1]
        assert client.returncode == 4


def test_the_key_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\nsecond\n")
    assert [key_of(None), key_of("right"), key_of(str(path))] == [None, "right", "first"]


# Flags


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["top", "--url", "127.0.0.1:8080"], "--url: expected an address such as http://"),
        (["top", "--url", "http://"], "--url: expected an address"),
        (["top", "--interval", "0"], "--interval: expected a number from 0.2"),
        (
            ["chat", "--url", "http://x", "--pool", "40%"],
            "--pool: expected no setting of the engine",
        ),
        (["chat", "--port", "1"], "chat: expected a known flag, found '--port'"),
    ],
)
def test_flags(arguments: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse(arguments, [0, 1])


# The commands


def test_top_through_a_pipe(url: str) -> None:
    done = run_program("top", "--url", url, "--api-key", "right")
    assert done.returncode == 0, done.stderr
    assert "moe-demo-q4_k_m ● ready" in done.stdout
    assert "experts: " in done.stdout and "compute" in done.stdout
    assert "\x1b" not in done.stdout


def chat(*flags: str, lines: str, history: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PROGRAM, "chat", "--history", str(history), *flags],
        input=lines, capture_output=True, text=True, check=False, timeout=2 * WAIT_SECONDS,
    )  # fmt: skip


def test_chat_through_a_pipe(url: str, tmp_path: Path) -> None:
    lines = 'Hello\n"""\ntwo\nlines\n"""\n/show\n/retry\none \\\nmore\n/nope\n/status\n'
    flags = ("--url", url, "--api-key", "right", "-n", "8", "--temperature", "0")
    done = chat(*flags, lines=lines, history=tmp_path / "h")
    assert done.returncode == 0, done.stderr
    assert "user: two\nlines\n" in done.stderr
    assert done.stderr.count("(8 tokens") == 4
    assert "warning: /nope: no such command" in done.stderr
    assert "ready; " in done.stderr
    assert len(done.stdout) > 20 and "user:" not in done.stdout


def test_a_conversation_that_is_too_long(url: str, tmp_path: Path) -> None:
    flags = ("--url", url, "--api-key", "right", "-n", "4", "--temperature", "0")
    lines = f"{'word ' * 3000}\nHello\n"
    done = chat(*flags, lines=lines, history=tmp_path / "h")
    assert done.returncode == 0, done.stderr
    assert "(the context), found " in done.stderr
    assert "; /undo or /clear makes room\n" in done.stderr
    assert "(4 tokens" in done.stderr  # what was too long is not asked again


def test_chat_with_a_service_of_its_own(tmp_path: Path) -> None:
    flags = ("--io-workers", "2", "--pool", "40%", "-n", "8", "--temperature", "0")
    done = chat(*flags, lines="Hello\n", history=tmp_path / "h")
    assert done.returncode == 0, done.stderr
    assert "mode: 2 I/O worker(s)" in done.stderr
    assert "(8 tokens" in done.stderr and done.stdout.strip()


@pytest.mark.parametrize(
    ("flags", "code", "error"),
    [
        (("--model", "/nonexistent.gguf"), 3, "/nonexistent.gguf: "),
        (("--memory", "1M"), 4, "--memory"),
        (("--url", "http://127.0.0.1:1"), 4, "expected a running service"),
    ],
)
def test_chat_that_cannot_begin(
    flags: tuple[str, ...], code: int, error: str, tmp_path: Path
) -> None:
    done = chat(*flags, lines="Hello\n", history=tmp_path / "h")
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1].startswith("moe-coord: error: ")
    assert error in done.stderr.splitlines()[-1]


class OnTerminal:
    """A program on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execvpe(PROGRAM[0], [*PROGRAM, *arguments], {**os.environ, "TERM": "xterm-256color"})
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str) -> None:
        """Until this was shown since the last time."""
        self._read_until(lambda: text in self.seen)
        self.seen = self.seen.partition(text)[2]

    def wait_for_characters(self, n_characters: int) -> None:
        """Until so many were shown since the last time."""
        self._read_until(lambda: len(self.seen) >= n_characters)

    def _read_until(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_over():
            assert time.monotonic() < deadline, self.seen
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.seen += os.read(self._terminal, 65536).decode("utf-8", "replace")

    def end(self) -> int:
        """Its exit code."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._terminal)
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            if select.select([self._terminal], [], [], 0.05)[0]:
                try:
                    os.read(self._terminal, 65536)
                except OSError:
                    time.sleep(0.05)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_top_on_a_terminal(url: str) -> None:
    top = OnTerminal("top", "--url", url, "--api-key", "right", "--interval", "0.3")
    top.wait_for("moe-demo-q4_k_m")
    top.wait_for("\x1b[")
    top.wait_for("moe-demo-q4_k_m")  # again
    top.type("q")
    assert top.end() == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_chat_on_a_terminal(url: str, tmp_path: Path) -> None:
    history = tmp_path / "deep" / "history"
    flags = ("--api-key", "right", "--history", str(history), "--seed", "1")
    talk = OnTerminal("chat", "--url", url, *flags)
    talk.wait_for("> ")
    talk.type("Tell me all\r")
    talk.wait_for("\n")
    talk.wait_for_characters(40)  # the answer has begun
    talk.type("\x03")
    talk.wait_for("(stopped)")
    talk.wait_for("> ")
    talk.type("/se\t temperature 0\r")  # completion: /set
    talk.wait_for("temperature 0.0")
    talk.wait_for("> ")
    talk.type("\x1b[A\r")  # the line before, again
    talk.wait_for("temperature 0.0")
    talk.wait_for("> ")  # a key between two prompts would be lost
    talk.type("\x04")
    assert talk.end() == 0
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.read_text().splitlines()[:1] == ["Tell me all"]


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert printable("a\x1b[2Jb\x07\r\n\té€") == "a�[2Jb��\n\té€"
