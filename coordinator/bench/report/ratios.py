"""The chart of paired ratios with their intervals, and how a pair is called in few words."""

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.bench.report.specs import Chart, Row, Short, Spec, axis, label, names, rows_pixels


def pair_label(found: Mapping[str, Any], short: Short) -> str:
    """What a ratio is of, in few words."""
    over, under = short.get(found["room"], ""), short.get(found["reference_room"], "")
    if over != under:
        return f"{label(found['arm'], over)} ÷ {under}"
    return label(f"{found['arm']} ÷ {found['reference']}", over)


def ratio_text(found: Mapping[str, Any]) -> str:
    """A ratio with its interval, as a table has it."""
    text = f"{found['median']:.2f}"
    return text if found["low"] is None else f"{text} [{found['low']:.2f}, {found['high']:.2f}]"


def ratios_chart(findings: Sequence[Mapping[str, Any]], short: Short) -> Chart | None:
    """Each pair with its interval; None without one. `hardware` is told where it is given."""
    rows: list[Row] = []
    for found in findings:
        if found.get("median") is None or found["what"] != "speed":
            continue
        low, high = found["low"] or found["median"], found["high"] or found["median"]
        name = pair_label(found, short)
        if found.get("hardware"):
            name = f"{name}, {_few_lines(found['hardware'])}"
        rows.append({"pair": name, "ratio": found["median"], "low": low, "high": high})
    if not rows:
        return None
    order = [row["pair"] for row in rows]
    y = names("pair", order)
    title = "× as fast (paired ratio)"
    low = axis(title, "low", scale={"zero": False, "nice": True})
    high, middle = {"field": "high"}, axis(title, "ratio")
    layers: list[Spec] = [
        {"mark": {"type": "rule", "strokeDash": [4, 4]}, "encoding": {"x": {"datum": 1}}},
        {"mark": {"type": "rule", "strokeWidth": 3}, "encoding": {"y": y, "x": low, "x2": high}},
        {
            "mark": {"type": "point", "filled": True, "opacity": 1, "size": 90},
            "encoding": {"y": y, "x": middle},
        },
    ]
    spec = {"data": {"values": rows}, "height": rows_pixels(order), "layer": layers}
    about = (
        "Median of the paired ratios and its 95 % interval. What crosses the dashed line at 1 "
        "claims nothing."
    )
    return Chart("ratios", "Each pair", about, spec)


def _few_lines(hardware: str) -> str:
    """A kind of hardware: its processor, and below it the other parts two by two."""
    processor, *others = hardware.split(", ")
    lines = [" · ".join(others[index : index + 2]) for index in range(0, len(others), 2)]
    return ", ".join((processor, *lines))
