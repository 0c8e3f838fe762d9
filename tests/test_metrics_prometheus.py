"""The real Prometheus scrapes a real run, also while a worker is killed and started again."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from arms import Together, submit_of
from gguf_builder import tiny_model
from needs import needs_program
from prometheus_program import Prometheus, running_prometheus

from coordinator.command.config import Config
from coordinator.command.line import parse
from coordinator.core.state import NewRequest
from coordinator.metrics.exposition import Exposition, run_view
from coordinator.metrics.series import SERIES
from coordinator.metrics.server import listen, serving
from coordinator.plan.machine import read_machine
from coordinator.plan.setup import prepared
from coordinator.processes.engine import Engine
from coordinator.serving.start import started

DEPLOY = Path(__file__).parent.parent / "deploy"
WAIT_SECONDS = 60.0
COUNTERS = '{__name__=~"moe_coord_.*_(total|count|sum|bucket)"}'
LONG_ANSWER_TOKENS, CONTEXT_TOKENS = 60_000, 2**16


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = needs_program("promtool", package="prometheus")
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=False)


# Files


def rule_files() -> list[str]:
    return sorted(map(str, (DEPLOY / "rules").glob("*.rules.yml")))


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", str(DEPLOY / "prometheus.yml")],
        ["check", "rules", *rule_files()],
        ["test", "rules", str(DEPLOY / "rules" / "rules.test.yml")],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool(arguments: list[str]) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_is_tested() -> None:
    tests = (DEPLOY / "rules" / "rules.test.yml").read_text()
    rules = "".join(Path(file).read_text() for file in rule_files())
    alerts = re.findall(r"- alert: (\w+)", rules)
    records = re.findall(r"- record: (\S+)", rules)
    assert len(alerts) > 5 and len(records) > 5
    for alert in alerts:
        assert re.search(rf"alertname: {alert}\n.*\n +exp_alerts:\n +- exp_labels", tests), alert
    for record in records:
        assert f"{record}" in tests, record


# A run


@dataclass
class ScrapedEngine:
    """A running engine whose metrics are served, and what to do to keep it going."""

    engine: Engine
    listener: Together
    port: int
    n_requests: int = 0

    def turn(self) -> None:
        """One turn of the loop; there is always an answer being generated."""
        if len(self.listener.ended) == self.n_requests:
            self.n_requests += 1
            submit = submit_of(self.n_requests, [1, 2, 3], CONTEXT_TOKENS)
            self.engine.submit(NewRequest(submit, LONG_ANSWER_TOKENS, frozenset()))
        self.engine.run_once(0.05)

    def turn_until(self, is_so: Callable[[], bool]) -> None:
        """Asks a few times a second; a wait without end fails the test."""
        deadline = time.monotonic() + WAIT_SECONDS
        next_look = 0.0
        while True:
            self.turn()
            now = time.monotonic()
            if now >= next_look:
                if is_so():
                    return
                next_look = time.monotonic() + 0.2
            assert now < deadline, "what was waited for did not come"

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.listener.tokens.values()))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ScrapedEngine]:
    model = tiny_model(
        tmp_path / "m.gguf", n_layers=3, n_experts=8, n_active=2, context_length=CONTEXT_TOKENS
    )
    config = parse(["--model", str(model), "--tokens", "1", "--io-workers", "2", "--pool", "40%"])
    assert isinstance(config, Config)
    listener = Together()
    with (
        prepared(config, read_machine()) as setup,
        listen(0) as server,
        started(setup, listener) as engine,
    ):
        port = server.getsockname()[1]
        with serving(server, Exposition(run_view(engine, setup))):
            while not engine.is_ready:
                engine.run_once()
            yield ScrapedEngine(engine, listener, port)


@pytest.fixture
def prometheus(run: ScrapedEngine, tmp_path: Path) -> Iterator[Prometheus]:
    """Prometheus on the shipped configuration, scraping the run."""
    with running_prometheus(run.port, tmp_path) as made:
        run.turn_until(made.is_there)
        yield made


def counters(prometheus: Prometheus) -> dict[tuple[tuple[str, str], ...], float]:
    """Every counter that Prometheus has now, by its labels and name."""
    found = prometheus.query(COUNTERS)
    return {tuple(sorted(labels.items())): value for labels, value in found}


def test_prometheus_sees_every_process_also_across_a_death(
    run: ScrapedEngine, prometheus: Prometheus
) -> None:
    everyone = {"coordinator", "io0", "io1", "compute"}
    run.turn_until(lambda: prometheus.up() == dict.fromkeys(everyone, 1))
    run.turn_until(lambda: run.n_tokens > 20)
    check_that_all_series_are_there(prometheus, everyone)

    # io0 is killed, and the one that takes its place stops before it is ready
    before = counters(prometheus)
    dead = run.engine.children.get("io0")
    assert dead is not None
    os.kill(dead.process.pid, signal.SIGKILL)
    while (child := run.engine.children.get("io0")) is None or child is dead:
        run.engine.run_once(0.05)
    os.kill(child.process.pid, signal.SIGSTOP)
    run.turn_until(lambda: prometheus.up() == dict.fromkeys(everyone, 1) | {"io0": 0})
    (target,) = [
        item
        for item in prometheus.ask("targets")["activeTargets"]
        if item["labels"]["process"] == "io0"
    ]
    assert "503" in target["lastError"]
    n_tokens = run.n_tokens
    run.turn_until(lambda: run.n_tokens > n_tokens + 20)  # io1 reads for both

    os.kill(child.process.pid, signal.SIGCONT)
    run.turn_until(lambda: prometheus.up() == dict.fromkeys(everyone, 1))
    restarts = 'moe_coord_restarts_total{worker="io0"}'
    run.turn_until(lambda: [value for _, value in prometheus.query(restarts)] == [1])
    n_read = n_reads_of_io0(prometheus)
    run.turn_until(lambda: n_reads_of_io0(prometheus) > n_read)

    # nothing fell: neither what Prometheus had before, nor at any scrape since
    after = counters(prometheus)
    assert before.keys() <= after.keys()
    assert not [key for key, value in before.items() if after[key] < value]
    for labels, values in prometheus.histories(f"{COUNTERS}[10m]"):
        assert values == sorted(values), labels
    assert all(ended.reason == "length" for ended in run.listener.ended.values())


def n_reads_of_io0(prometheus: Prometheus) -> float:
    ((_, value),) = prometheus.query('moe_coord_read_seconds_count{process="io0"}')
    return value


def check_that_all_series_are_there(prometheus: Prometheus, everyone: set[str]) -> None:
    """Every declared series at every process that is to show it, and figures that moved."""
    of: dict[str, set[str]] = {
        "coordinator": {"coordinator"},
        "compute": {"compute"},
        "readers": {"io0", "io1"},
        "http": set(),  # this run has none
    }
    for series in SERIES:
        name = series.full_name + ("_count" if series.kind == "histogram" else "")
        found = {labels["process"] for labels, _ in prometheus.query(name)}
        assert found == of.get(series.whose, everyone), name
    for moved in (
        'moe_coord_tokens_total{kind="generated"}', 'moe_coord_expert_requests_total{result="hit"}',
        'moe_coord_expert_requests_total{result="miss"}', "moe_coord_evictions_total",
        'moe_coord_read_bytes_total{kind="slab"}', "moe_coord_read_seconds_count",
        'moe_coord_slots{state="ready"}', 'moe_coord_token_time_seconds_total{phase="decode"}',
        "moe_coord_accounted_bytes", "moe_coord_budget_bytes", "moe_coord_process_resident_bytes",
        "moe_coord_requests_running",
    ):  # fmt: skip
        values = [value for _, value in prometheus.query(moved)]
        assert values and all(value > 0 for value in values), moved
