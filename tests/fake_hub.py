"""A small Hugging Face hub on the loopback address: one repository, ranges, a line that stalls."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What is served, and what was asked."""

    files: Mapping[str, bytes]
    repository: str = "owner/repo"
    stall_after_bytes: int | None = None  # the next download stands still there
    wrong_sha: bool = False
    ranges: list[str | None] = field(default_factory=list)  # of the downloads
    url: str = ""

    def sha256(self, name: str) -> str:
        found = hashlib.sha256(self.files[name]).hexdigest()
        return found[::-1] if self.wrong_sha else found

    def description(self) -> bytes:
        """Of the repository."""
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "blobId": "0" * 40,
                "lfs": {"sha256": self.sha256(name), "size": len(data), "pointerSize": 130},
            }
            for name, data in self.files.items()
        ]
        described = {"id": self.repository, "modelId": self.repository, "sha": COMMIT}
        more = {"private": False, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings}
        return json.dumps(described | more).encode()


@contextmanager
def hub_of(files: Mapping[str, bytes]) -> Iterator[Hub]:
    """A hub that serves these files until the `with` ends."""
    hub, over = Hub(files), threading.Event()

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{hub.repository}"):
                self._send(200, hub.description(), {"Content-Type": "application/json"})
                return
            name = path.removeprefix(f"/{hub.repository}/resolve/").partition("/")[2]
            if name not in hub.files:
                missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}
                self._send(404, b"{}", missing, has_body=has_body)
                return
            data = hub.files[name]
            digest = f'"{hub.sha256(name)}"'
            known = {"ETag": digest, "X-Linked-ETag": digest, "X-Repo-Commit": COMMIT}
            known |= {"X-Linked-Size": str(len(data)), "Accept-Ranges": "bytes"}
            if not has_body:
                self._send(200, data, known, has_body=False)
                return
            span = self.headers.get("Range")
            hub.ranges.append(span)
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", span or "")
            start = int(match[1]) if match is not None else 0
            if start:
                known["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206 if start else 200, data[start:], known)

        def _send(
            self, status: int, body: bytes, headers: Mapping[str, str], *, has_body: bool = True
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not has_body:
                return
            stall, is_file = hub.stall_after_bytes, "ETag" in headers
            if not is_file or stall is None:
                self.wfile.write(body)
                return
            hub.stall_after_bytes = None
            self.wfile.write(body[:stall])
            over.wait(60)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            over.set()
            server.shutdown()
            thread.join()
