"""Runs the Ray Serve application on a local Ray and asks it; prints what was found as JSON.

python tests/ray_program.py PORT MODEL; a process of its own, since Ray starts many and ends slowly.
"""

import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

import application
import ray
from ray import serve

WAIT_SECONDS = 60.0
GREEDY = {"prompt": "In the beginning", "temperature": 0}


class Client:
    """Asks over HTTP."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{self._url}{path}", data)
        request.add_header("Content-Type", "application/json")
        return urllib.request.urlopen(request, timeout=WAIT_SECONDS)

    def status(self) -> Any:
        with self.open("/status.json") as answer:
            return json.load(answer)

    def coordinator(self) -> int | None:
        """The pid of the service behind; None while there is none."""
        with contextlib.suppress(OSError, HTTPException):
            return int(self.status()["processes"][0]["pid"])
        return None


def wait_until(is_so: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not is_so():
        if time.monotonic() > start + WAIT_SECONDS:
            raise TimeoutError("waited too long")
        time.sleep(0.05)


def ask(client: Client) -> dict[str, Any]:
    """What the service behind Ray does."""
    found: dict[str, Any] = {}
    with client.open("/v1/completions", {**GREEDY, "max_tokens": 8}) as answer:
        found["text"] = json.load(answer)["choices"][0]["text"]
    with client.open("/v1/completions", {**GREEDY, "max_tokens": 8, "stream": True}) as answer:
        found["type"] = answer.headers["Content-Type"]
        lines = answer.read().decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    found["last"] = events[-1]
    texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    found["streamed"], found["pieces"] = "".join(texts), len(texts)
    try:
        client.open("/v1/completions", {"prompt": "x", "nope": 1})
    except urllib.error.HTTPError as error:
        found["refused"] = [error.code, json.load(error)["error"]["param"]]

    left = client.open("/v1/completions", {**GREEDY, "max_tokens": 900, "stream": True})
    left.read(64)
    found["running"] = client.status()["requests"]["running"]
    left.close()
    wait_until(lambda: client.status()["requests"]["running"] == 0)
    found["cancelled"] = client.status()["totals"]["requests"]["cancelled"]

    before = client.coordinator()
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: client.coordinator() not in (None, before))
    found["last_pid"] = client.coordinator()
    return found


def main(port: int, model: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 1024 * 1024)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    arguments = {"model": model, "memory": "700M", "cpus": "0.5", "flags": "--pool 40%"}
    serve.run(application.build(arguments))
    found = ask(Client(port))
    serve.delete("default")
    with contextlib.suppress(ProcessLookupError):
        os.kill(found["last_pid"], 0)
        found["is_left"] = True
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
