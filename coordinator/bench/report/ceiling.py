"""Charts and words of a measured ceiling: the ways of reading, the disk over time, the limit."""

from typing import Any

from coordinator.bench.report.page import Page, Table
from coordinator.bench.report.specs import ROW_PIXELS, Chart, Row, Spec, axis, colour, names

CEILING_TITLE = "moe-coord ceiling"


def ceiling_page(record: dict[str, Any], lines: list[str]) -> Page:
    """`lines` are those that the command prints."""
    disk = record.get("disk") or {}
    made = [_limits(record), _depths(disk), _ways(disk), _seconds(disk)]
    rows = [
        (row["way"], row["order"], str(row["depth"]), f"{row['gb_per_s']:.2f}")
        for row in disk.get("ways", ())
    ]
    ways = [row["way"] for row in disk.get("ways", ())]  # their lines are the table's rows
    told = tuple(f"  {way}" for way in ways)
    head = ("way", "order", "reads in flight", "GB/s")
    headline = lines[-1] if record.get("compute") and disk else lines[0]
    return Page(
        CEILING_TITLE,
        headline,
        [line.strip() for line in lines if line != headline and not line.startswith(told)],
        [],
        [Table("Every way of reading", head, rows)] if rows else [],
        [chart for chart in made if chart is not None],
        [
            (f"{group}: {name}", "–" if value is None else str(value))
            for group in ("machine", "versions")
            for name, value in (record.get(group) or {}).items()
        ],
    )


def _limits(record: dict[str, Any]) -> Chart | None:
    rows: list[Row] = [
        {"hits": 100 * row["hit_rate"], "rate": row["tok_s"]}
        for row in record.get("limits", ())
        if row["tok_s"]
    ]
    if not rows:
        return None
    spec: Spec = {
        "data": {"values": rows},
        "height": 280,
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": axis("hit rate (%)", "hits"),
            "y": axis("tokens per second, at most", "rate"),
        },
    }
    about = "The slower of the disk, for what is missed, and of compute with everything resident."
    return Chart("limit", "What disk and arithmetic allow", about, spec)


def _depths(disk: dict[str, Any]) -> Chart | None:
    rows: list[Row] = [
        {"depth": row["depth"], "rate": row["gb_per_s"]} for row in disk.get("depths", ())
    ]
    if not rows:
        return None
    spec: Spec = {
        "data": {"values": rows},
        "height": 240,
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": axis("reads in flight (count)", "depth", "ordinal", axis={"labelAngle": 0}),
            "y": axis("rate (GB/s)", "rate", scale={"zero": True}),
        },
    }
    about = "O_DIRECT at the size of an expert, random places."
    return Chart("depths", "The disk by reads in flight", about, spec)


def _ways(disk: dict[str, Any]) -> Chart | None:
    rows: list[Row] = [
        {"way": f"{row['way']}, {row['depth']} in flight", "order": row["order"],
         "rate": row["gb_per_s"]}
        for row in disk.get("ways", ())
    ]  # fmt: skip
    if not rows:
        return None
    order = list(dict.fromkeys(row["way"] for row in rows))
    spec: Spec = {
        "data": {"values": rows},
        "height": ROW_PIXELS * len(order) * 3 // 2,
        "mark": {"type": "bar"},
        "encoding": {
            "y": names("way", order),
            "yOffset": {"field": "order", "type": "nominal"},
            "x": axis("rate (GB/s)", "rate"),
            "color": colour("order", "order"),
        },
    }
    about = "From a file whose pages were dropped before; no place is read twice."
    return Chart("ways", "Every way of reading", about, spec)


def _seconds(disk: dict[str, Any]) -> Chart | None:
    rows: list[Row] = [
        {"second": second + 1, "rate": rate, "depth": f"{row['depth']} in flight"}
        for row in disk.get("depths", ())
        for second, rate in enumerate(row["per_second"])
    ]
    if not rows:
        return None
    spec: Spec = {
        "data": {"values": rows},
        "height": 240,
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": axis("time (s)", "second", "ordinal", axis={"labelAngle": 0}),
            "y": axis("rate (GB/s)", "rate", scale={"zero": True}),
            "color": colour("depth", "reads in flight"),
        },
    }
    about = "A disk that throttles is fast at first."
    return Chart("over_time", "The disk second by second", about, spec)
