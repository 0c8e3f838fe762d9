"""The real Prometheus on the shipped configuration, for tests that ask it."""

import contextlib
import http.client
import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployment import DEPLOY
from needs import needs_program
from running_program import HOST, free_port


class Prometheus:
    """A running Prometheus, asked over its API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://{HOST}:{port}/api/v1"

    def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer."""
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of every series of an instant query."""
        result = self.ask("query", query=expression)["result"]
        return [(item["metric"], float(item["value"][1])) for item in result]

    def histories(self, selector: str) -> list[tuple[dict[str, str], list[float]]]:
        """Labels and all values of every series of a range selector, oldest first."""
        result = self.ask("query", query=selector)["result"]
        return [(item["metric"], [float(value) for _, value in item["values"]]) for item in result]

    def up(self) -> dict[str, float]:
        """Process -> what Prometheus says of it."""
        return {labels["process"]: value for labels, value in self.query("up")}

    def is_there(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return bool(self.ask("status/runtimeinfo"))
        return False


@contextlib.contextmanager
def running_prometheus(metrics_port: int, folder: Path) -> Iterator[Prometheus]:
    """Prometheus on the shipped configuration, but impatient and on the run's port.

    It may not answer yet. Its files lie in `folder`.
    """
    program = needs_program("prometheus", package="prometheus")
    text = (DEPLOY / "prometheus.yml").read_text()
    for shipped, here in {
        "127.0.0.1:9400": f"127.0.0.1:{metrics_port}",
        "scrape_interval: 5s": "scrape_interval: 500ms",
        "evaluation_interval: 15s": "evaluation_interval: 1s",
        "refresh_interval: 15s": "refresh_interval: 1s",
        "rules/*": f"{DEPLOY}/rules/*",
    }.items():
        assert text.count(shipped) > 0
        text = text.replace(shipped, here)
    config = folder / "prometheus.yml"
    config.write_text(text)
    port = free_port()
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={HOST}:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(20)
