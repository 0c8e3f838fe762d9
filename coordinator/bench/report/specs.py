"""The words that charts are made of: channels with titled axes, colours with a legend below.

Vega-Lite specifications are plain dictionaries. A chart is drawn twice from the same one, in the
page and as PNG, so it knows no colours of its background and no width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
Row = dict[str, Any]
Short = Mapping[str, str]  # rooms by name, as few words
ROW_PIXELS = 32  # height of a bar with its gap: two lines of its name
LINE_PIXELS = 15  # of each line, where names have more


@dataclass(frozen=True, slots=True)
class Chart:
    """`name` is the file's; `about` one sentence under the title."""

    name: str
    title: str
    about: str
    spec: Spec


def axis(title: str, field: str, kind: str = "quantitative", **more: Any) -> Spec:
    """One channel with a titled axis."""
    return {"field": field, "type": kind, "title": title, **more}


def names(field: str, order: Sequence[str]) -> Spec:
    """The vertical channel of a chart with a row per name; a comma begins another line."""
    return {
        "field": field,
        "type": "nominal",
        "sort": list(order),
        "axis": {"title": None, "labelLimit": 190, "labelExpr": "split(datum.label, ', ')"},
    }


def rows_pixels(order: Sequence[str]) -> int:
    """The height of so many rows with their names (see `names`)."""
    n_lines = max((len(name.split(", ")) for name in order), default=1)
    return len(order) * max(ROW_PIXELS, LINE_PIXELS * n_lines)


def colour(field: str, title: str, domain: Sequence[str] | None = None) -> Spec:
    """A colour per name, explained below the chart."""
    scale = {"scale": {"domain": list(domain)}} if domain else {}
    legend = {"orient": "bottom", "columns": 2, "labelLimit": 280, "title": title}
    return {"field": field, "type": "nominal", "legend": legend, **scale}


def label(arm: str, room: str) -> str:
    """A row's name: an arm, and the room where there are several."""
    return f"{arm}, {room}" if room else arm
