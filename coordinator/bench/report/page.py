"""The page of a report: one HTML file with everything in it, for narrow and wide, light and dark.

Knows no measurement: it gets words, tables and charts. The charts are drawn by the script library
that is put into the page, in the colours that the reader's system asks for.
"""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.bench.report.specs import Chart

FONT = "system-ui, sans-serif"
# told apart with every kind of colour vision (Okabe and Ito), then two more
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8a8a8a",
    "#a6761d",
    "#7570b3",
)
LIGHT = {"text": "#1b1b1b", "line": "#d8d8d8"}
DARK = {"text": "#e8e8e8", "line": "#444444"}


@dataclass(frozen=True, slots=True)
class Table:
    """A title, a head and rows; the first column is text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Page:
    """What is shown, from top to bottom."""

    title: str
    headline: str
    sentences: Sequence[str]
    warnings: Sequence[str]
    tables: Sequence[Table]
    charts: Sequence[Chart]
    facts: Sequence[tuple[str, str]]


def config(*, dark: bool) -> dict[str, Any]:
    """Vega-Lite's configuration for a background."""
    shade = DARK if dark else LIGHT
    text, line = shade["text"], shade["line"]
    words = {"labelColor": text, "titleColor": text, "labelFontSize": 12, "titleFontSize": 12}
    return {
        "background": None,
        "font": "sans-serif",
        "view": {"stroke": line},
        "range": {"category": list(COLOURS), "heatmap": {"scheme": "viridis"}},
        "axis": {**words, "gridColor": line, "domainColor": line, "tickColor": line},
        "axisX": {"labelOverlap": "greedy", "labelSeparation": 6},
        "legend": {**words, "symbolLimit": 60},
        "header": words,
        "mark": {"color": COLOURS[0]},
        "rule": {"color": text},
    }


def page_html(page: Page, script: str) -> str:
    """The file. `script` defines `draw(element, spec, options)`."""
    specs = {f"chart-{chart.name}": chart.spec for chart in page.charts}
    themes = {"light": config(dark=False), "dark": config(dark=True)}
    data = _safe_json({"specs": specs, "themes": themes})
    body = "\n".join(
        [
            f"<h1>{html.escape(page.title)}</h1>",
            f'<p class="headline">{html.escape(page.headline)}</p>',
            _list(page.sentences, "more"),
            _list(page.warnings, "warnings"),
            *map(_table, page.tables),
            *map(_chart, page.charts),
            _table(Table("What it was measured on", ("", ""), page.facts)),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n{body}\n</main>\n"
        f"<script>{script.replace('</script', '<' + chr(92) + '/script')}</script>\n"
        f"<script>const report = {data};\n{DRAW}</script>\n</body>\n</html>\n"
    )


def _safe_json(value: Any) -> str:
    """JSON that cannot end a script element, whatever stands in it."""
    return json.dumps(value, ensure_ascii=True).replace("<", "\\u003c")


def _list(lines: Sequence[str], kind: str) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if lines else ""


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>"
        for row in table.rows
    )
    return (
        f"<section><h2>{html.escape(table.title)}</h2><div class=wide><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _chart(chart: Chart) -> str:
    return (
        f"<section><h2>{html.escape(chart.title)}</h2><p>{html.escape(chart.about)}</p>"
        f'<div class="chart" id="chart-{html.escape(chart.name)}"></div></section>'
    )


STYLE = f"""
:root {{ color-scheme: light dark; --text: {LIGHT["text"]}; --line: {LIGHT["line"]};
  --back: #ffffff; --note: #fff3d6; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: {DARK["text"]}; --line: {DARK["line"]}; --back: #161616; --note: #3a2f12; }} }}
body {{ margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 {FONT}; }}
main {{ max-width: 1200px; margin: 0 auto; padding: 12px; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin: 1.8rem 0 0.4rem; }}
.headline {{ font-size: 1.15rem; font-weight: 600; }}
.warnings {{ background: var(--note); padding: 8px 8px 8px 28px; border-radius: 6px; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14px; }}
th, td {{ padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
.chart {{ width: 100%; overflow: hidden; }}
.chart .vega-bindings {{ font-size: 14px; margin-top: 6px; }}
.chart label {{ margin-right: 12px; }}
@media (min-width: 1100px) {{ .chart {{ max-width: 1000px; }} }}
"""

DRAW = """
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const drawn = [];
async function drawAll() {
  for (const view of drawn.splice(0)) view.finalize();
  for (const [id, spec] of Object.entries(report.specs)) {
    const config = report.themes[dark.matches ? "dark" : "light"];
    const options = { actions: false, renderer: "svg", config };
    const autosize = { type: "fit-x", contains: "padding" };
    const wide = { ...spec, width: "container", autosize };
    drawn.push(await draw("#" + id, wide, options));
  }
  document.body.dataset.drawn = drawn.length;
}
dark.addEventListener("change", drawAll);
drawAll();
"""
