"""Pages that Prometheus scrapes: what they say of a run, and that no counter ever falls."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import metrics_table
import pytest
from needs import needs_program
from prometheus_client.parser import text_string_to_metric_families
from scraped_run import ScrapedRun, figure, figures, scraped_run
from simulation import need

from coordinator.core.actions import Deliver, Ended
from coordinator.metrics.exposition import KEEP_SECONDS, Exposition, UseTotals, measure
from coordinator.metrics.http_totals import HttpTotals
from coordinator.metrics.one_series import PREFIX, Series
from coordinator.metrics.scrape import Life
from coordinator.metrics.series import SERIES
from coordinator.processes.totals import READ_BOUNDS_SECONDS, Totals
from shm.messages import Sampled
from shm.service_messages import HistogramGrowth, HttpGrowth, RouteCount

ROOT = Path(__file__).parent.parent
MS = 1_000_000
MAX_SCRAPE_SECONDS = 0.005  # of processor time


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run() -> ScrapedRun:
    return scraped_run()


def page(run: ScrapedRun, process: str) -> bytes:
    made = Exposition(run.view).page(process)
    assert made is not None
    return made


# Names and documentation


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_names_follow_the_rules(series: Series) -> None:
    name = series.full_name
    assert re.fullmatch(r"moe_coord_[a-z]+(_[a-z]+)*", name)
    assert name.endswith("_total") == (series.kind == "counter")
    assert not re.search(r"_(ms|millis|milliseconds|kb|mb|mib|percent|us|ns)(_|$)", name)
    assert series.help.endswith(".")
    if series.kind == "histogram":
        assert name.endswith("_seconds")


def test_no_name_is_used_twice() -> None:
    names = [series.full_name for series in SERIES]
    assert len(names) == len(set(names))


def test_the_documentation_is_the_table() -> None:
    found = (ROOT / "deploy" / "METRICS.md").read_text()
    command = "python tests/metrics_table.py > deploy/METRICS.md"
    assert found == metrics_table.document(), f"run: {command}"


# What a page says


def test_every_series_is_on_some_page_and_on_the_page_for_people(run: ScrapedRun) -> None:
    run.lives["http"], run.http = run.lives["io0"], HttpTotals()
    run.http.grow(growth(("/health", 200, 1)))
    exposition = Exposition(run.view)
    declared = {series.full_name for series in SERIES}
    of_processes = set()
    for process in exposition.processes:
        shown = exposition.page(process)
        assert shown is not None
        of_processes |= names_on(shown)
    assert of_processes == declared
    assert names_on(exposition.page_of_all()) == declared


def growth(*answers: tuple[str, int, int]) -> HttpGrowth:
    nothing = HistogramGrowth((0, 1), 7)
    return HttpGrowth(tuple(RouteCount(*answer) for answer in answers), 2, 1, nothing, nothing)


def test_the_http_process_goes_on_where_it_was(run: ScrapedRun) -> None:
    run.lives["http"], run.http = run.lives["io0"], HttpTotals()
    for _ in range(2):
        run.http.grow(growth(("/health", 200, 2), ("other", 404, 1)))
        run.http.died()
    shown = page(run, "http")
    found = {"route": "/health", "status": "200"}
    assert figure(shown, "moe_coord_http_requests_total", **found) == 4
    assert figure(shown, "moe_coord_http_requests_in_flight") == 0
    assert figure(shown, "moe_coord_http_first_token_seconds_count") == 2


def names_on(shown: bytes) -> set[str]:
    lines = shown.decode().splitlines()
    return {line.split()[2] for line in lines if line.startswith("# TYPE")}


def test_a_page_per_process_shows_its_part(run: ScrapedRun) -> None:
    names = {process: names_on(page(run, process)) for process in ("coordinator", "io0", "compute")}
    process_names = {name for name in names["io0"] if name.startswith(f"{PREFIX}process_")}
    assert len(process_names) == 5
    assert names["coordinator"] & names["io0"] == process_names
    assert names["compute"] & names["io0"] == process_names
    assert f"{PREFIX}read_bytes_total" in names["io0"]
    assert f"{PREFIX}tokens_total" in names["coordinator"]
    assert f"{PREFIX}steps_total" in names["compute"]


def test_compute_shows_reads_when_it_reads_for_itself() -> None:
    run = scraped_run(("compute",))
    run.totals = Totals(["compute"])
    assert {f"{PREFIX}read_bytes_total", f"{PREFIX}steps_total"} <= names_on(page(run, "compute"))


def test_figures_of_the_coordinator(run: ScrapedRun) -> None:
    _, released = run.engine.run_layer(need(0, [1, 2, 3]))
    run.engine.run_layer(need(0, [1, 2], released))
    run.totals.standing_uses = 5
    run.totals.prompt_tokens = 11
    run.totals.performed(Deliver((Sampled(1, 2, 0.0),)), 0)
    run.totals.performed(Ended(1, "length", None), 0)
    run.restarts["io1"] = 2
    run.lives["io1"] = None
    run.engine.core.residency.counters.stale_answers = 6
    run.engine.core.residency.prefetch.counters.issued = 9
    run.engine.core.residency.prefetch.counters.used = 4
    run.engine.core.residency.prefetch.counters.wasted = 3
    shown = page(run, "coordinator")
    expected = {
        ("tokens_total", ("kind", "prompt")): 11,
        ("tokens_total", ("kind", "generated")): 1,
        ("requests_total", ("reason", "length")): 1,
        ("requests_total", ("reason", "eos")): 0,
        ("expert_requests_total", ("result", "hit")): 2 + 5,
        ("expert_requests_total", ("result", "miss")): 3,
        ("slots", ("state", "ready")): 3,
        ("slots", ("state", "free")): 6,
        ("slots", ("state", "loading")): 0,
        ("restarts_total", ("worker", "io1")): 2,
        ("restarts_total", ("worker", "io0")): 0,
        ("worker_up", ("worker", "io1")): 0,
        ("worker_up", ("worker", "compute")): 1,
        ("budget_bytes", ("part", "pool")): 500,
        ("budget_bytes", ("part", "page_tables")): 10,
    }
    for (name, label), value in expected.items():
        assert figure(shown, PREFIX + name, **dict([label])) == value, (name, label)
    plain = {
        "prefetch_issued_total": 9, "prefetch_used_total": 4, "prefetch_wasted_total": 3,
        "stale_answers_total": 6, "evictions_total": 0, "slots_lost_total": 0,
        "budget_limit_bytes": 1000, "accounted_bytes": 700, "accounted_peak_bytes": 800,
        "requests_running": 0,
    }  # fmt: skip
    for name, value in plain.items():
        assert figure(shown, PREFIX + name) == value, name
    build = {"version": "1.2.3", "kernels": "numpy", "reader": "direct", "policy": "lru"}
    assert figure(shown, f"{PREFIX}build_info", **build) == 1


def test_the_build_is_unknown_until_compute_has_started(run: ScrapedRun) -> None:
    run.kernels = None
    assert f"{PREFIX}build_info" not in names_on(page(run, "coordinator"))


def test_figures_of_compute(run: ScrapedRun) -> None:
    decode = run.totals.phases["decode"]
    decode.steps, decode.compute_ns, decode.wait_disk_ns = 4, 5_000 * MS, 250 * MS
    decode.coordination_ns = MS
    run.engine.run_layer(need(0, [1]))
    shown = page(run, "compute")
    assert figure(shown, f"{PREFIX}steps_total", phase="decode") == 4
    assert figure(shown, f"{PREFIX}steps_total", phase="prompt") == 0
    assert figure(shown, f"{PREFIX}layer_requests_total") == 1
    for part, seconds in {"compute": 5.0, "disk": 0.25, "coordination": 0.001}.items():
        labels = {"phase": "decode", "part": part}
        assert figure(shown, f"{PREFIX}token_time_seconds_total", **labels) == seconds


def test_figures_of_a_reader(run: ScrapedRun) -> None:
    reader = run.totals.readers["io1"]
    reader.bytes_read, reader.bytes_over_read, reader.reads_failed = 4096, 512, 1
    for duration_ns in (MS // 20, MS, MS + 1, 7_000 * MS):
        reader.latency.observe(duration_ns)
    shown = page(run, "io1")
    assert figure(shown, f"{PREFIX}read_bytes_total", kind="slab") == 4096
    assert figure(shown, f"{PREFIX}read_bytes_total", kind="over_read") == 512
    assert figure(shown, f"{PREFIX}reads_failed_total") == 1
    counts = {
        bound: figure(shown, f"{PREFIX}read_seconds_bucket", le=bound)
        for bound in [*map(str, READ_BOUNDS_SECONDS), "+Inf"]
    }
    assert (counts["0.0001"], counts["0.001"], counts["0.002"]) == (1, 2, 3)
    assert (counts["5.0"], counts["+Inf"]) == (3, 4)
    assert figure(shown, f"{PREFIX}read_seconds_count") == 4
    assert figure(shown, f"{PREFIX}read_seconds_sum") == pytest.approx(7.002050001)
    assert figure(page(run, "io0"), f"{PREFIX}read_seconds_count") == 0


def test_the_page_for_people_has_all_figures_of_all_pages(run: ScrapedRun) -> None:
    run.totals.readers["io0"].bytes_read = 1
    exposition = Exposition(run.view)
    all_of_them = figures(exposition.page_of_all())
    n_found = 0
    for process in exposition.processes:
        shown = exposition.page(process)
        assert shown is not None
        for (name, labels), value in figures(shown).items():
            n_found += 1
            found = all_of_them[name, labels | {("process", process)}]
            assert found == value or name.startswith(f"{PREFIX}process_")
    assert n_found == len(all_of_them)


def test_a_process_that_is_down_has_no_page_and_its_counters_stay(run: ScrapedRun) -> None:
    run.totals.readers["io0"].bytes_read = 77
    run.lives["io0"] = None
    exposition = Exposition(run.view)
    assert exposition.page("io0") is None
    assert exposition.page("io1") is not None
    shown = exposition.page_of_all()
    labels = {"process": "io0", "kind": "slab"}
    assert figure(shown, f"{PREFIX}read_bytes_total", **labels) == 77
    resident = {labels for name, labels in figures(shown) if name.endswith("resident_bytes")}
    assert frozenset({("process", "io0")}) not in resident
    assert len(resident) == 3


def test_promtool_finds_no_fault(run: ScrapedRun) -> None:
    promtool = needs_program("promtool", package="prometheus")
    exposition = Exposition(run.view)
    pages = [exposition.page(process) for process in exposition.processes]
    for shown in [*pages, exposition.page_of_all()]:
        assert shown is not None
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=shown, capture_output=True, check=False
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_the_number_of_series_does_not_depend_on_the_model() -> None:
    small = Exposition(scraped_run(n_layers=2, n_experts=2, n_slots=2).view).page_of_all()
    large_run = scraped_run(n_layers=20, n_experts=30, n_slots=300)
    large_run.engine.run_layer(need(19, list(range(30))))
    large = Exposition(large_run.view).page_of_all()
    assert figures(small).keys() == figures(large).keys()


# When a page is made


def test_a_page_is_kept_for_a_while(run: ScrapedRun) -> None:
    clock = Clock()
    exposition = Exposition(run.view, clock)

    def tokens() -> float:
        shown = exposition.page("coordinator")
        assert shown is not None
        return figure(shown, f"{PREFIX}tokens_total", kind="prompt")

    assert tokens() == 0
    run.totals.prompt_tokens = 8
    clock.now += KEEP_SECONDS / 2
    assert tokens() == 0
    clock.now += KEEP_SECONDS / 2
    assert tokens() == 8


def test_a_scrape_costs_little() -> None:
    """A model of 94 layers with 128 experts each, half of them in memory; 8 I/O workers."""
    workers = (*(f"io{number}" for number in range(8)), "compute")
    run = scraped_run(workers, n_layers=94, n_experts=128, n_slots=6016)
    clock = Clock()
    exposition = Exposition(run.view, clock)
    n_scrapes, took = 50, []
    for _ in range(4):  # the best of some: others disturb the caches and take the clock speed
        started = time.thread_time()
        for number in range(n_scrapes):
            clock.now += KEEP_SECONDS
            exposition.page(exposition.processes[number % len(exposition.processes)])
        took.append((time.thread_time() - started) / n_scrapes)
    assert min(took) < MAX_SCRAPE_SECONDS


# What the kernel counts

BUSY = """
import sys, time
data = bytearray(20_000_000)
while time.process_time() < float(sys.argv[1]): pass
time.sleep(0.01)
print("done", flush=True)
sys.stdin.read()
"""


def busy_process(cpu_seconds: float) -> "subprocess.Popen[str]":
    """A process that used so much time, touched 20 MB, slept, and waits for its input's end."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(cpu_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    return process


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_measure(processes: list["subprocess.Popen[str]"]) -> None:
    processes.append(busy_process(0.2))
    use = measure(processes[0].pid)
    assert use is not None
    assert use.resident_bytes > 20_000_000
    assert use.locked_bytes == 0
    assert 0.18 <= use.used.user_seconds + use.used.system_seconds < 1.0
    assert use.used.minor_faults > 20_000_000 // 4096
    assert use.used.voluntary_switches > 0


def test_a_dead_process_is_not_measured_before_and_after_it_is_reaped(
    processes: list["subprocess.Popen[str]"],
) -> None:
    processes.append(busy_process(0.0))
    process = processes[0]
    process.kill()
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    assert measure(process.pid) is None
    process.wait()
    assert measure(process.pid) is None


def test_what_a_name_used_never_falls(processes: list["subprocess.Popen[str]"]) -> None:
    totals = UseTotals()
    processes += [busy_process(0.3), busy_process(0.1), busy_process(0.1)]
    seen = []
    for started_ns, process in enumerate(processes):
        life = Life(process.pid, started_ns)
        for _ in range(2):
            use = totals.of("io0", life)
            assert use is not None
            seen.append(use)
        process.kill()
        process.wait()
        assert totals.of("io0", life) is None
    for before, after in pairwise(seen):
        assert after.used.user_seconds >= before.used.user_seconds
        assert after.used.system_seconds >= before.used.system_seconds
        assert after.used.minor_faults >= before.used.minor_faults
        assert after.used.voluntary_switches >= before.used.voluntary_switches
    assert seen[-1].used.user_seconds + seen[-1].used.system_seconds >= 0.4
    assert seen[-1].used.minor_faults > 3 * 20_000_000 // 4096
    assert seen[-1].resident_bytes < 3 * 20_000_000  # memory is of the present life


def test_pages_are_what_the_parser_takes(run: ScrapedRun) -> None:
    families = list(text_string_to_metric_families(page(run, "io0").decode()))
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
