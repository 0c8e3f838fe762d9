"""Draws the report of a folder: ``python -P -m coordinator.bench.report FOLDER``.

A process of its own, the only one that loads the chart library: Vega-Lite, because one plain
dictionary per chart gives the page (offline, at any width, light and dark) and the PNG (without a
browser). Reads what `bench --out` or `ceiling --out` left in the folder and writes report.html and
the PNGs beside it. Nothing may import it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.bench.ceiling import CEILING, lines
from coordinator.bench.merge import MERGED, n_runs_text
from coordinator.bench.records import BLOCKS, Record, in_room, read_blocks
from coordinator.bench.report.ceiling import ceiling_page
from coordinator.bench.report.charts import charts_of
from coordinator.bench.report.page import Page, Table, config, page_html
from coordinator.bench.report.ratios import pair_label, ratio_text, ratios_chart
from coordinator.bench.report.routing import routing_charts
from coordinator.bench.report.specs import Chart
from coordinator.bench.results import ANSWERS
from coordinator.bench.table import HEAD, table_rows

try:
    import vl_convert

    HAS_LIBRARY = True
except ImportError:
    HAS_LIBRARY = False

BUNDLE = "window.draw = vegaEmbed;"
PNG_PIXELS, PNG_SCALE = 720, 2
EXIT_CONFIGURATION = 2


def main() -> int:
    """Exit code: 0, or 2 where the chart library or what is to be drawn is missing."""
    folder = Path(sys.argv[1])
    if not HAS_LIBRARY:
        print(
            "report: expected the library of the charts, found none; the answers are complete "
            "without it: pip install 'moe-coord[report]' draws them at the next call",
            file=sys.stderr,
        )
        return EXIT_CONFIGURATION
    page = page_of(folder)
    script = vl_convert.javascript_bundle(BUNDLE)
    (folder / "report.html").write_text(page_html(page, script), encoding="utf-8")
    for chart in page.charts:
        (folder / f"{chart.name}.png").write_bytes(png_of(chart))
    return 0


def png_of(chart: Chart) -> bytes:
    """A chart on white, for a README."""
    spec = {**chart.spec, "width": PNG_PIXELS}
    spec = {**spec, "autosize": {"type": "fit-x", "contains": "padding"}}
    look = {**config(dark=False), "background": "white"}
    data: bytes = vl_convert.vegalite_to_png(spec, config=look, scale=PNG_SCALE)
    return data


def page_of(folder: Path) -> Page:
    """What stands in the folder: a ceiling, a comparison, or those of several machines."""
    if not (folder / ANSWERS).exists():
        record = json.loads((folder / CEILING).read_text(encoding="utf-8"))
        return ceiling_page(record, lines(record))
    answers: dict[str, Any] = json.loads((folder / ANSWERS).read_text(encoding="utf-8"))
    if "kinds" in answers:
        is_one = len(answers["kinds"]) == 1
        return merged_page(answers, read_blocks(folder / MERGED) if is_one else [])
    records = read_blocks(folder / BLOCKS)
    charts = [*charts_of(answers, records), *routing_charts(folder)]
    tables = tables_of(records, answers["rooms"], answers["arms"], answers["reference"])
    sentences = sentences_of(answers)
    sentences += [text for text in (answers.get("page_cache"),) if text]
    return Page(
        f"moe-coord bench: {answers['question']}",
        answers["headline"],
        sentences,
        answers["warnings"],
        tables,
        charts,
        facts_of(answers),
    )


def sentences_of(answers: dict[str, Any]) -> list[str]:
    """What is claimed beside the headline."""
    others = [claim["sentence"] for claim in answers["claims"]]
    return [] if answers["too_small"] else [s for s in others if s != answers["headline"]]


def tables_of(
    records: Sequence[Record], rooms: Sequence[str], arms: Sequence[str], reference: str
) -> list[Table]:
    """Medians of each arm, a table for each room."""
    return [
        Table(
            f"{room}: medians, each ÷ {reference}",
            HEAD,
            table_rows(in_room(records, room), arms, reference),
        )
        for room in rooms
    ]


def merged_page(answers: dict[str, Any], records: Sequence[Record]) -> Page:
    """One row per kind of hardware; `records`: of a single kind, to show all that they say."""
    short, kinds = answers["short_rooms"], answers["kinds"]
    findings = [
        {**found, "hardware": kind["hardware"]}
        for kind in kinds
        for claim in kind["claims"]
        for found in claim["findings"]
        if found["what"] == "speed" and found.get("median") is not None
    ]
    tables: list[Table] = []
    sentences: list[str] = []
    made: list[Chart | None] = [ratios_chart(findings, short)]
    if records and findings:
        made = [*charts_of({**kinds[0], "short_rooms": short}, records)]
        sentences = sentences_of(kinds[0])
        arms = list(dict.fromkeys(record["arm"] for record in records))
        tables = tables_of(records, list(short), arms, findings[0]["reference"])
    columns = list(dict.fromkeys(pair_label(found, short) for found in findings))
    cells = {(f["hardware"], pair_label(f, short)): ratio_text(f) for f in findings}
    rows = [
        (kind["hardware"], *[cells.get((kind["hardware"], name), "–") for name in columns])
        for kind in kinds
    ]
    return Page(
        f"moe-coord bench: {answers['question']}, {len(kinds)} "
        f"kind{'s' if len(kinds) != 1 else ''} of hardware",
        "; ".join(f"{kind['hardware']}: {kind['headline']}" for kind in kinds),
        sentences,
        [f"{kind['hardware']}: {line}" for kind in kinds for line in kind["warnings"]],
        [Table("Paired ratios by kind of hardware", ("hardware", *columns), rows), *tables],
        [chart for chart in made if chart is not None],
        [(kind["hardware"], n_runs_text(kind["runs"])) for kind in kinds],
    )


def facts_of(answers: dict[str, Any]) -> list[tuple[str, str]]:
    """Machine, disk, versions and settings as rows."""
    rows = []
    for group in ("machine", "disk", "file_system", "settings", "versions"):
        for name, value in (answers.get(group) or {}).items():
            rows.append((f"{group}: {name.replace('_', ' ')}", _plain(value)))
    return rows


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
