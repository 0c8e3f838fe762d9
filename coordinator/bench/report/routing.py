"""Charts of recorded routing: which experts are used, and what each policy makes of it.

The traces are those that a comparison recorded beside its blocks: one prompt, and another whose
counts serve the policies that begin with counts.
"""

from collections.abc import Sequence
from pathlib import Path

from coordinator.bench.report.specs import Chart, Row, Spec, axis, colour
from coordinator.bench.trace import TRACES
from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import PoolSize
from coordinator.core.policies import Key
from coordinator.core.policy_choice import POLICIES
from coordinator.core.slot_classes import PoolTooSmallError
from coordinator.routing.replay_report import NEED_COUNTS, pool_for, results_of
from coordinator.routing.trace_file import Trace, read_trace
from coordinator.routing.trace_statistics import use_counts

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
CELL_PIXELS = 14


def routing_charts(folder: Path) -> list[Chart]:
    """None where no trace was recorded."""
    traces = []
    for name in TRACES:
        try:
            traces.append(read_trace(folder / name))
        except ConfigError:
            break
    if not traces:
        return []
    other = traces[1] if len(traces) > 1 else None
    return [_hit_rates(traces[0], other), _heat_map(traces)]


def _hit_rates(trace: Trace, other: Trace | None) -> Chart:
    counts: dict[Key, float] = dict(use_counts(other.needs)) if other is not None else {}
    policies = [name for name in POLICIES if counts or name not in NEED_COUNTS]
    starts = {name: counts if name in NEED_COUNTS else {} for name in policies}
    rows: list[Row] = []
    for share in SHARES:
        try:
            pool = pool_for(trace, PoolSize(share=share))
        except PoolTooSmallError:
            continue
        rows += [
            {"policy": result.policy, "percent": 100 * share,
             "hits": 100 * result.outcome.decode.hit_rate}
            for result in results_of(trace, pool, policies, starts)
        ]  # fmt: skip
    order = list(dict.fromkeys(row["policy"] for row in rows))
    spec: Spec = {
        "data": {"values": rows},
        "height": 320,
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": axis("pool (% of all experts)", "percent"),
            "y": axis("hit rate of decode steps (%)", "hits", scale={"domain": [0, 100]}),
            "color": colour("policy", "policy", order),
            "strokeDash": {
                "condition": {"test": "datum.policy == 'belady'", "value": [6, 3]},
                "value": [1, 0],
            },
        },
    }  # fmt: skip
    about = "Replay of a recorded routing. Nothing can be above belady, which knows what comes."
    if counts:
        about += f" {' and '.join(NEED_COUNTS)} begin with the counts of another prompt."
    return Chart("hit_rates", "Hit rate against size, every policy", about, spec)


def _heat_map(traces: Sequence[Trace]) -> Chart:
    header = traces[0].header
    counts = use_counts([need for trace in traces for need in trace.needs])
    rows: list[Row] = []
    for layer in header.layers:
        total = sum(counts[layer, expert] for expert in range(header.n_experts))
        for expert in range(header.n_experts):
            share = counts[layer, expert] * header.n_experts / max(1, total)
            rows.append({"layer": layer, "expert": expert, "use": round(share, 3)})
    spec: Spec = {
        "data": {"values": rows},
        "height": CELL_PIXELS * len(header.layers),
        "mark": {"type": "rect"},
        "encoding": {
            "x": axis("expert (number)", "expert", "ordinal",
                      axis={"labelOverlap": True, "labelAngle": 0}),
            "y": axis("layer (number)", "layer", "ordinal", axis={"labelOverlap": True}),
            "color": {"field": "use", "type": "quantitative",
                      "legend": {"orient": "bottom", "title": "uses ÷ those of an even spread"}},
        },
    }  # fmt: skip
    about = "Rows of one colour use their experts evenly; bright cells are a hot set."
    return Chart("expert_use", "Use of the experts, layer by layer", about, spec)
