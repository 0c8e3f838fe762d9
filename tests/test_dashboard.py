"""The Grafana dashboard after a run of the service with the real Prometheus: no panel is empty."""

import json
import math
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import dashboard, panel_queries
from prometheus_program import Prometheus, running_prometheus
from running_program import RunningProgram, free_port, wait_until

HOST = "127.0.0.1"
WAIT_SECONDS = 60.0


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """Of a service that answers one prompt after another."""
    port, metrics_port = free_port(), free_port()
    flags = ("--port", str(port), "--metrics-port", str(metrics_port), "--pool", "40%")
    is_over = threading.Event()

    def ask() -> None:
        wanted = {"prompt": "In the beginning", "max_tokens": 30, "temperature": 0}
        request = urllib.request.Request(
            f"http://{HOST}:{port}/v1/completions",
            json.dumps(wanted).encode(),
            {"Content-Type": "application/json"},
        )
        while not is_over.is_set():
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
                answer.read()

    with running_prometheus(metrics_port, tmp_path) as made, RunningProgram(*flags) as program:
        program.wait_for("ready: ")
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield made
        finally:
            is_over.set()
            asking.join(WAIT_SECONDS)


def is_empty(prometheus: Prometheus, query: str) -> bool:
    values = [value for _, value in prometheus.query(query)]
    return not any(math.isfinite(value) for value in values)


def test_no_panel_is_empty(prometheus: Prometheus) -> None:
    queries = dict.fromkeys(panel_queries())
    wait_until(prometheus.is_there, WAIT_SECONDS)
    wait_until(  # rates need two scrapes, and recorded figures a third
        lambda: not [title for title, query in queries if is_empty(prometheus, query)], WAIT_SECONDS
    )
    down = [query for title, query in queries if title == "Processes down"]
    assert [prometheus.query(query)[0][1] for query in down] == [0]
    panels = [panel for panel in dashboard()["panels"] if panel.get("targets")]
    assert len(panels) > 20
