"""Stands in for llama.cpp's programs: answers as they do, and computes nothing.

fake_peer.py bench ARGUMENTS     like llama-bench: progress lines, then JSON
fake_peer.py server ARGUMENTS    like llama-server: a completion over HTTP on a socket file
"""

import json
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler

TOKEN_SECONDS = 0.025


def value_of(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1]


def bench() -> None:
    n_runs, n_tokens = int(value_of("-r")), int(value_of("-n"))
    samples = []
    for number in range(n_runs):
        line = f"llama-bench: benchmark 1/1: generation run {number + 1}/{n_runs}"
        print(line, file=sys.stderr, flush=True)
        time.sleep(n_tokens * TOKEN_SECONDS)
        samples.append(int(n_tokens * TOKEN_SECONDS * 1e9))
    threads = int(value_of("-t"))
    record = {"samples_ns": samples, "n_gen": n_tokens, "n_prompt": 0, "n_threads": threads}
    print(json.dumps([record]))


class Completion(BaseHTTPRequestHandler):
    """`/health`, `/props`, and `/completion` with the ids 1, 2, 3 …, as events."""

    def address_string(self) -> str:
        return "socket file"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/props":
            self.wfile.write(b'{"build_info": "b1-fake"}')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for number in range(asked["n_predict"]):
            time.sleep(TOKEN_SECONDS)
            event = {"tokens_predicted": number + 1, "tokens": [number + 1]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()


def server() -> None:
    with socketserver.UnixStreamServer(value_of("--host"), Completion) as serving:
        serving.serve_forever()


if __name__ == "__main__":
    {"bench": bench, "server": server}[sys.argv.pop(1)]()
