"""A `llama-server` for one block: ``python -P -m coordinator.bench.llama_server ARGUMENTS``.

A process of its own inside the block's group: starts the server on a socket file, waits until the
model is loaded, asks for one completion of given token ids, and notes when tokens arrive.
What lies between is HTTP on one machine, some 0.1 ms per token. A token that ends inside a
character arrives together with the next. Prints one JSON object. Nothing may import it.
"""

import argparse
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shm.birth import die_with_parent

POLL_SECONDS = 0.1
LOAD_SECONDS = 600.0
TOKEN_SECONDS = 600.0
TERMINATE_SECONDS = 5.0
EXIT_INTERNAL = 5


class ServerError(Exception):
    """The server did not do what was asked: one line."""


class SocketFileConnection(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TOKEN_SECONDS)
        self._path = path

    def connect(self) -> None:
        """See `HTTPConnection`."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TOKEN_SECONDS)
        self.sock.connect(str(self._path))


def main() -> int:
    """Exit code: 0, or 5 if the server does not answer."""
    parser = argparse.ArgumentParser(prog="coordinator.bench.llama_server", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", required=True, help="ids such as 5,77,300")
    parser.add_argument("--n", type=int, required=True, help="tokens to generate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--greedy", action="store_true", help="the likeliest tokens, and their ids")
    parser.add_argument("command", nargs="+", help="the server and its own flags, behind --")
    options = parser.parse_args()
    temperature = 0.0 if options.greedy else 1.0
    prompt = [int(text) for text in options.tokens.split(",")]
    try:
        with running(options.command, options.model, len(prompt) + options.n + 1) as path:
            done = complete(path, prompt, options.n, options.seed, temperature)
            print(json.dumps(done | {"build_info": build_of(path)}))
    except (ServerError, OSError, http.client.HTTPException, ValueError, KeyError) as error:
        print(f"llama-server: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_INTERNAL
    return 0


@contextlib.contextmanager
def running(command: list[str], model: str, n_context: int) -> Iterator[Path]:
    """A server that has loaded the model; yields its socket file. Raises `ServerError`."""
    with tempfile.TemporaryDirectory(prefix="moe-coord-peer-") as folder:
        path = Path(folder) / "server.sock"  # the server takes a host that ends so as a file
        ours = ["-m", model, "--host", str(path), "-c", str(n_context), "-np", "1", "--no-warmup"]
        server = subprocess.Popen(
            [*command, *ours], stdin=subprocess.DEVNULL, stdout=sys.stderr,
            preexec_fn=die_with_parent,  # this process has one thread
        )  # fmt: skip
        try:
            wait_until_loaded(server, path)
            yield path
        finally:
            server.terminate()
            try:
                server.wait(TERMINATE_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wait_until_loaded(server: "subprocess.Popen[bytes]", path: Path) -> None:
    """Until it says that it is healthy. Raises `ServerError` if it ends or takes too long."""
    deadline = time.monotonic() + LOAD_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ServerError(f"expected a server that stays up, found exit {server.returncode}")
        with contextlib.suppress(ConnectionError, FileNotFoundError):
            connection = SocketFileConnection(path)
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        time.sleep(POLL_SECONDS)
    raise ServerError(f"expected a loaded model within {LOAD_SECONDS:.0f} s, found none")


def build_of(path: Path) -> str | None:
    """Which version of the server it is; None where it does not say."""
    connection = SocketFileConnection(path)
    connection.request("GET", "/props")
    try:
        return str(json.loads(connection.getresponse().read())["build_info"])
    except (ValueError, KeyError, TypeError):
        return None


def complete(
    path: Path, prompt: list[int], n_tokens: int, seed: int, temperature: float
) -> dict[str, Any]:
    """One completion; when its tokens came, and which they are. Raises `ServerError`."""
    request = {
        "prompt": prompt, "n_predict": n_tokens, "temperature": temperature, "seed": seed,
        "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "stream": True,
        "cache_prompt": False, "return_tokens": True,
    }  # fmt: skip
    connection = SocketFileConnection(path)
    started = last = time.monotonic()
    connection.request(
        "POST", "/completion", json.dumps(request), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise ServerError(f"expected status 200, found {response.status}: {response.read(200)!r}")
    arrivals: list[tuple[int, float]] = []  # tokens and seconds of each event
    tokens: list[int] = []
    n_before = 0
    for line in response:
        kind, _, data = line.partition(b": ")
        if kind != b"data":
            continue
        now = time.monotonic()
        event = json.loads(data)
        if "error" in event:
            raise ServerError(f"expected tokens, found {str(event['error'])[:200]}")
        tokens += event.get("tokens", [])
        n_new = event["tokens_predicted"] - n_before
        if n_new > 0:
            arrivals.append((n_new, round(now - last, 6)))
            n_before, last = n_before + n_new, now
    if n_before != n_tokens:
        raise ServerError(f"expected {n_tokens} tokens, found {n_before}")
    return {"started_monotonic_s": started, "arrivals": arrivals, "tokens": tokens}


if __name__ == "__main__":
    sys.exit(main())
