"""Charts of a comparison's blocks. Every axis has a title with its unit."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from coordinator.bench.records import Record, by_round, in_room, is_foreign, value_of
from coordinator.bench.report.ratios import ratios_chart
from coordinator.bench.report.specs import (
    ROW_PIXELS,
    Chart,
    Row,
    Short,
    Spec,
    axis,
    colour,
    label,
    names,
)
from coordinator.bench.rooms import WHOLE_MACHINE
from coordinator.bench.statistics import MIN_PAIRS, median_interval

MiB = 1 << 20
PARTS: Mapping[str, str] = {
    "compute_s": "compute",
    "wait_disk_s": "waiting for the disk",
    "coordination_s": "coordination",
}
REST = "everything else"


def charts_of(answers: Mapping[str, Any], records: Sequence[Record]) -> list[Chart]:
    """All charts that the blocks allow."""
    good = [record for record in records if "error" not in record and not is_foreign(record)]
    short = dict(answers["short_rooms"])
    if len(short) == 1:
        short = dict.fromkeys(short, "")  # nothing to tell apart
    findings = [found for claim in answers["claims"] for found in claim["findings"]]
    made = [
        ratios_chart(findings, short),
        _memory(good),
        _token_time(good, short),
        _reads_in_flight(good, short),
        *_rounds(good),
    ]
    return [chart for chart in made if chart is not None]


def _memory(records: Sequence[Record]) -> Chart | None:
    rows: list[Row] = []
    for room, arm in _keys(records):
        mine = [r for r in in_room(records, room) if r["arm"] == arm and r.get("tok_s")]
        sizes = [size for r in mine if (size := _memory_bytes(r)) is not None]
        rates = [r["tok_s"] for r in mine]
        if not sizes or not rates:
            continue
        low, high = _interval(rates)
        prefetch = value_of(mine[0], ("report", "settings", "prefetch")) or "none"
        rows.append(
            {"memory": median(sizes) / MiB, "rate": median(rates), "low": low, "high": high,
             "arm": arm, "prefetch": prefetch}
        )  # fmt: skip
    if len({row["memory"] for row in rows}) < 2:
        return None  # one size is no curve
    kinds = list(dict.fromkeys(row["prefetch"] for row in rows))
    x = axis("memory of all processes (MiB)", "memory", scale={"zero": False, "nice": True})
    rate = "tokens per second"
    shared = {"x": x, "color": colour("arm", "arm")}
    middle, high_end = axis(rate, "rate"), {"field": "high"}
    low_end = axis(rate, "low", scale={"zero": True})
    layers: list[Spec] = [
        {"mark": {"type": "line"}, "encoding": {**shared, "y": middle}},
        {"mark": {"type": "rule", "strokeWidth": 2},
         "encoding": {**shared, "y": low_end, "y2": high_end}},
        {"mark": {"type": "point", "filled": True, "opacity": 1, "size": 70},
         "encoding": {**shared, "y": middle}},
    ]  # fmt: skip
    spec: Spec = {"data": {"values": rows}, "height": 300, "layer": layers}
    if len(kinds) > 1:
        bound = {"input": "radio", "options": ["all", *kinds], "name": "prefetch: "}
        spec["params"] = [{"name": "shown", "value": "all", "bind": bound}]
        spec["transform"] = [{"filter": "shown == 'all' || datum.prefetch == shown"}]
    about = "Median of the blocks with its 95 % interval."
    return Chart("memory", "Speed against memory", about, spec)


def _memory_bytes(record: Record) -> float | None:
    """The cap where there is one, else what the processes took."""
    for path in (
        ("settings", "cap_bytes"),
        ("report", "memory", "total_peak_bytes"),
        ("memory", "peak_bytes"),
    ):
        found = value_of(record, path)
        if found:
            return float(found)
    return None


def _token_time(records: Sequence[Record], short: Short) -> Chart | None:
    rows: list[Row] = []
    for room, arm in _keys(records):
        mine = [r for r in in_room(records, room) if r["arm"] == arm and token_parts(r)]
        if not mine:
            continue
        of_parts = [token_parts(record) for record in mine]
        for part in (*PARTS.values(), REST):
            rows.append(
                {"arm": label(arm, short[room]), "part": part,
                 "ms": 1e3 * median(found[part] for found in of_parts)}
            )  # fmt: skip
    if not rows:
        return None
    order = list(dict.fromkeys(row["arm"] for row in rows))
    domain = [*PARTS.values(), REST]
    spec = {
        "data": {"values": rows},
        "height": ROW_PIXELS * len(order),
        "transform": [{"calculate": f"indexof({domain!r}, datum.part)", "as": "order"}],
        "mark": {"type": "bar"},
        "encoding": {
            "y": names("arm", order),
            "x": axis("time of one token (ms)", "ms", stack="zero"),
            "color": colour("part", "part", domain),
            "order": {"field": "order", "type": "quantitative"},
        },
    }
    about = (
        "Medians over the blocks; what no part accounts for is sampling, messages, and the "
        "interpreter."
    )
    return Chart("token_time", "Where the time of a token goes", about, spec)


def token_parts(record: Record) -> dict[str, float]:
    """Seconds of a token by part; empty where the program did not say."""
    times = value_of(record, ("report", "token_time"))
    spans = record.get("spans")
    if not times or not spans:
        return {}
    parts = {name: float(times[key]) for key, name in PARTS.items()}
    total = sum(seconds for _, seconds in spans) / max(1, sum(n for n, _ in spans))
    parts[REST] = max(0.0, total - sum(parts.values()))
    return parts


def _reads_in_flight(records: Sequence[Record], short: Short) -> Chart | None:
    rows: list[Row] = []
    for room, arm in _keys(records):
        mine = [r for r in in_room(records, room) if r["arm"] == arm]
        for kind, path in (
            ("allowed", ("report", "settings", "reads_in_flight")),
            ("mean of the run", ("report", "token_time", "mean_reads_in_flight")),
        ):
            known = [found for r in mine if (found := value_of(r, path)) is not None]
            if known:
                rows.append({"arm": label(arm, short[room]), "kind": kind, "reads": median(known)})
    if not rows:
        return None
    order = list(dict.fromkeys(row["arm"] for row in rows))
    spec = {
        "data": {"values": rows},
        "height": ROW_PIXELS * len(order),
        "mark": {"type": "point", "filled": True, "opacity": 1, "size": 110},
        "encoding": {
            "y": names("arm", order),
            "x": axis("reads in flight (count)", "reads", scale={"zero": True}),
            "color": colour("kind", ""),
            "shape": {"field": "kind", "type": "nominal"},
        },
    }
    about = (
        "Mean by Little's law: the seconds of all reads ÷ the seconds of the run. Far below what "
        "is allowed, the disk had little to do."
    )
    return Chart("reads_in_flight", "Reads in flight", about, spec)


def _rounds(records: Sequence[Record]) -> list[Chart]:
    charts = []
    for number, room in enumerate(dict.fromkeys(record["room"] for record in records)):
        mine = in_room(records, room)
        rows = [
            {"round": n_round + 1, "rate": rate, "arm": arm}
            for arm in dict.fromkeys(record["arm"] for record in mine)
            for n_round, rate in enumerate(by_round(mine, arm, ("tok_s",)))
            if rate
        ]
        if not rows:
            continue
        spec = {
            "data": {"values": rows},
            "height": 220,
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": axis("round (number)", "round", "ordinal", axis={"labelAngle": 0}),
                "y": axis("tokens per second", "rate"),
                "color": colour("arm", "arm"),
            },
        }
        about = (
            "Lines that rise or fall together are the machine's; only what stays between them is "
            "an arm's."
        )
        title = "Block by block" + ("" if room == WHOLE_MACHINE else f": {room}")
        charts.append(Chart(f"rounds_{number + 1}", title, about, spec))
    return charts


def _keys(records: Sequence[Record]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((record["room"], record["arm"]) for record in records))


def _interval(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < MIN_PAIRS:
        return values[0], values[0]
    return median_interval(values)
