"""The report: complete in one file, charts with units, readable in a real browser."""

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from arms import PROGRAM
from bench_blocks import blocks

from coordinator.bench.answers import answer_of
from coordinator.bench.questions import Pair, Sweep
from coordinator.bench.records import Record, value_of
from coordinator.bench.report.charts import charts_of, token_parts
from coordinator.bench.report.page import Page, Table, page_html
from coordinator.bench.report.ratios import ratios_chart
from coordinator.bench.report.specs import LINE_PIXELS, ROW_PIXELS, Chart
from coordinator.bench.rooms import Room

ROOMS = (Room("20% of the experts in the pool", short="20%"), Room("all of them", short="all"))
PAIRS = (
    Pair("a separate I/O process", "reading inline", "process", "inline"),
    Pair("more memory", "less", "inline", "inline", (ROOMS[1], ROOMS[0])),
)
CONSOLE = re.compile(r":CONSOLE[:(\]]")


def measured() -> list[Record]:
    found = []
    for room, speed in zip(ROOMS, (5.0, 10.0), strict=True):
        mine = blocks({"inline": speed, "process": 1.3 * speed}, 6, 1, room.name)
        for record in mine:
            memory = {"total_peak_bytes": int(speed * (100 << 20))}
            record["report"] = {**record["report"], "memory": memory}
        found += mine
    for record in found:
        on = "router" if record["arm"] == "process" else "off"
        settings = {**value_of(record, ("report", "settings")), "prefetch": on}
        record["report"] = {**record["report"], "settings": settings}
    return found


def answers(records: list[Record]) -> dict[str, Any]:
    sweep = Sweep("io-process", (), PAIRS)
    return {
        **answer_of(records, sweep, ROOMS, 2 << 30).as_json(),
        "rooms": [room.name for room in ROOMS],
        "short_rooms": {room.name: room.short for room in ROOMS},
        "arms": ["inline", "process"], "reference": "inline",
        "warnings": ["<b>a warning</b> & more </script>"],
        "machine": {"cpu": "c"}, "settings": {"tokens": 24},
    }  # fmt: skip


def charts() -> list[Chart]:
    records = measured()
    return charts_of(answers(records), records)


def encodings(spec: Any) -> Iterator[tuple[str, Any]]:
    """Channel and definition of every encoding, at any depth."""
    if isinstance(spec, dict):
        yield from spec.get("encoding", {}).items()
        for value in spec.values():
            yield from encodings(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from encodings(value)


def test_every_chart_is_there_and_every_axis_has_its_unit() -> None:
    found = charts()
    names = [chart.name for chart in found]
    assert names == ["ratios", "memory", "token_time", "reads_in_flight", "rounds_1", "rounds_2"]
    for chart in found:
        for channel, shown in encodings(chart.spec):
            if channel in ("x", "y") and shown.get("type") == "quantitative":
                assert re.search(r"\(.+\)|per second", shown["title"]), (chart.name, channel)


def test_blocks_that_had_help_are_in_no_chart() -> None:
    records = measured()
    before = [chart.spec for chart in charts_of(answers(records), records)]
    settings = {**value_of(records[0], ("report", "settings")), "reader": "buffered"}
    report = {**records[0]["report"], "settings": settings}
    helped = {**records[0], "tok_s": 1e6, "cached_before": 1 << 30, "report": report, "arm": "new"}
    found = charts_of(answers(records), [*records, helped])
    assert [chart.spec for chart in found] == before


def test_a_row_is_as_high_as_its_name_has_lines() -> None:
    """Of a merged report a row names the hardware: its lines ran into those of the next row."""
    finding = {
        "arm": "process", "reference": "inline", "room": "1 GiB", "reference_room": "1 GiB",
        "what": "speed", "median": 1.1, "low": 1.0, "high": 1.2,
    }  # fmt: skip
    kinds = [f"a processor, 2 cores, {size} GiB, vda, ext4" for size in (8, 24)]
    rows = [{**finding, "hardware": kind} for kind in kinds]
    chart = ratios_chart(rows, {"1 GiB": "1 GiB"})
    assert chart is not None
    names = [row["pair"].split(", ") for row in chart.spec["data"]["values"]]
    assert names[0] == ["process ÷ inline", "1 GiB", "a processor", "2 cores · 8 GiB", "vda · ext4"]
    assert chart.spec["height"] >= 2 * len(names[0]) * LINE_PIXELS
    alone = ratios_chart([finding], {})
    assert alone is not None and alone.spec["height"] == ROW_PIXELS


def test_the_switch_for_prefetch_is_there_where_both_were_measured() -> None:
    (memory,) = [chart for chart in charts() if chart.name == "memory"]
    assert memory.spec["params"][0]["bind"]["options"] == ["all", "off", "router"]


def test_parts_of_a_token_add_up() -> None:
    record = measured()[0]
    parts = token_parts(record)
    assert sum(parts.values()) == pytest.approx(record["measured_s"] / record["measured_tokens"])
    assert parts["everything else"] > 0
    assert token_parts({}) == {}


def test_what_is_put_into_the_page_cannot_leave_it() -> None:
    bad = "</script><script>alert(1)</script>"
    chart = Chart("c", bad, bad, {"data": {"values": [{"x": bad}]}})
    tables = [Table(bad, (bad,), [(bad,)])]
    page = Page(bad, bad, [bad], [bad], tables, [chart], [(bad, bad)])
    text = page_html(page, "let library = '</script>';")
    assert text.count("<script>") == text.count("</script>") == 2
    assert "alert(1)</script>" not in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a comparison leaves, and the report that the program draws of it."""
    pytest.importorskip("vl_convert", reason="needs the extra: pip install 'moe-coord[report]'")
    folder = tmp_path_factory.mktemp("report")
    records = measured()
    lines = "".join(json.dumps({**record, "pairs": []}) + "\n" for record in records)
    (folder / "blocks.jsonl").write_text(lines)
    (folder / "answers.json").write_text(json.dumps(answers(records)))
    command = [*PROGRAM[:-1], "coordinator.bench.report", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return folder


def test_one_file_without_addresses(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    outside_scripts = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert re.findall(r'<[^>]+(?:src|href)="(?!data:)[^"]*"', outside_scripts) == []
    assert "@import" not in text and "is 1." in text
    assert "&lt;b&gt;a warning&lt;/b&gt; &amp; more" in text
    for chart in charts():
        assert (folder / f"{chart.name}.png").read_bytes().startswith(b"\x89PNG")


def browser() -> str:
    """Path of Chromium. Without it the test is skipped; on CI a skip is a failure."""
    path = shutil.which("chromium")
    if path is None and os.environ.get("CI") == "true":
        pytest.fail("the Debian package chromium is missing: `make ci-deps` installs it")
    if path is None:
        pytest.skip("needs the Debian package chromium")
    return path


FRAME = """<!doctype html>
<iframe id=f srcdoc="{page}" style="width:{width}px;height:5000px"></iframe>
<script>
const frame = document.getElementById("f");
const timer = setInterval(() => {{
  const page = frame.contentDocument;
  if (!page.body || !page.body.dataset.drawn) return;
  clearInterval(timer);
  const svgs = [...page.querySelectorAll(".chart svg")].map((svg) => svg.getBoundingClientRect());
  const small = [...page.querySelectorAll(".chart svg text")]
    .filter((text) => text.textContent && parseFloat(getComputedStyle(text).fontSize) < 10).length;
  document.title = JSON.stringify({{
    drawn: svgs.length, overflow: page.documentElement.scrollWidth > {width},
    widest: Math.max(...svgs.map((box) => box.right)), small,
    back: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
  }});
}}, 50);
</script>"""


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1600, "light")])
def test_in_a_browser(folder: Path, tmp_path: Path, width: int, scheme: str) -> None:
    """Nothing on the console, all charts drawn inside the page, no network, both schemes."""
    page = html.escape((folder / "report.html").read_text(), quote=True)
    (tmp_path / "frame.html").write_text(FRAME.format(page=page, width=width))
    done = subprocess.run(
        [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}",
         f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
         "--enable-logging=stderr", "--virtual-time-budget=20000",
         f"--window-size={width + 50},900",
         f"file://{tmp_path / 'frame.html'}"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert not [line for line in done.stderr.splitlines() if CONSOLE.search(line)], done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stdout[:500]
    found = json.loads(html.unescape(title[1]))
    assert found["drawn"] == len(charts()) and not found["overflow"]
    assert found["widest"] <= width and found["small"] == 0
    assert found["back"] == ("rgb(22, 22, 22)" if scheme == "dark" else "rgb(255, 255, 255)")
