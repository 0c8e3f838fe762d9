"""`moe-coord trace`: what a recorded routing says about model and text, as tables or as JSON."""

import dataclasses
import json
from collections.abc import Sequence
from statistics import median
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import format_size
from coordinator.command.tables import console_on, print_table
from coordinator.command.trace_commands import TraceCommand
from coordinator.routing.trace_file import Trace, is_prompt, read_trace
from coordinator.routing.trace_statistics import (
    SKEW_SHARES,
    Guessed,
    LayerSkew,
    Transfer,
    locality,
    locality_by_chance,
    predictors,
    runs_of_tokens,
    skew,
    transfer,
    working_set,
)


@dataclasses.dataclass(frozen=True, slots=True)
class TraceReport:
    """All that is told of a trace. Shares are from 0 to 1; `working_set` has experts and bytes."""

    n_prompt_steps: int
    n_decode_steps: int
    requests: int
    n_experts: int
    n_active: int
    token_cycle_bytes: int
    all_experts_bytes: int
    skew: Sequence[LayerSkew]
    locality: dict[int, float]
    locality_by_chance: float
    working_set: dict[int, tuple[float, float]]
    predictors: Sequence[Guessed]
    transfer: Sequence[Transfer]


def show_trace(command: TraceCommand, output: TextIO | None) -> None:
    """Print the report (None: to a closed standard output). Raises `ConfigError`."""
    trace = read_trace(command.trace)
    other = read_trace(command.other) if command.other is not None else None
    if other is not None and other.header.fingerprint != trace.header.fingerprint:
        raise ConfigError(
            f"OTHER: expected a trace of the same model ({trace.header.fingerprint}), found one of "
            f"{other.header.fingerprint[:40]!a}; experts of two models have nothing in common"
        )
    report = report_of(trace, other)
    if output is None:
        return
    if command.json:
        print(json.dumps({"trace": str(command.trace), **_record(report)}), file=output)
    else:
        _draw(report, console_on(output))


def report_of(trace: Trace, other: Trace | None) -> TraceReport:
    """The report of a trace, and of how it relates to another."""
    slabs = trace.header.slab_table()
    slab_bytes = {layer.layer: layer.slab_bytes for layer in slabs.layers}
    runs = list(runs_of_tokens(trace.needs))
    return TraceReport(
        n_prompt_steps=len({need.step for need in trace.needs if is_prompt(need)}),
        n_decode_steps=sum(map(len, runs)),
        requests=sum(len(need.experts) for need in trace.needs),
        n_experts=trace.header.n_experts,
        n_active=trace.header.n_active,
        token_cycle_bytes=trace.header.n_active * sum(slab_bytes.values()),
        all_experts_bytes=slabs.total_bytes,
        skew=skew(trace),
        locality=locality(runs),
        locality_by_chance=locality_by_chance(runs),
        working_set=working_set(runs, slab_bytes),
        predictors=predictors(trace, runs),
        transfer=transfer(trace, other) if other is not None else (),
    )


def _record(report: TraceReport) -> dict[str, Any]:
    record = dataclasses.asdict(report)
    record["skew_shares"] = SKEW_SHARES
    record["predictors"] = [
        {**dataclasses.asdict(found), "accuracy": round(found.accuracy, 6)}
        for found in report.predictors
    ]
    return record


def _draw(report: TraceReport, console: Console) -> None:
    console.print(
        Text(
            f"{report.n_prompt_steps} prompt and {report.n_decode_steps} decode steps, "
            f"{len(report.skew)} layers of {report.n_experts} experts of which a token uses "
            f"{report.n_active}\n{report.requests} requests; token cycle "
            f"{format_size(report.token_cycle_bytes)} of {format_size(report.all_experts_bytes)}\n"
        )
    )
    _draw_skew(report, console)
    rows = [(f"{lag} before", _percent(share)) for lag, share in report.locality.items()]
    rows.append(("by chance", _percent(report.locality_by_chance)))
    print_table(console, "locality: experts that an earlier token used too", ["token", "%"], rows)
    sizes = [
        (
            str(window),
            f"{n_experts:.0f}",
            format_size(round(n_bytes)),
            _percent(n_bytes / report.all_experts_bytes),
        )
        for window, (n_experts, n_bytes) in report.working_set.items()
    ]
    head = ["tokens in a row", "experts", "size", "% of all"]
    print_table(console, "working set: what is touched in a while", head, sizes)
    guesses = [
        (found.predictor, str(found.guessed), str(found.right), _percent(found.accuracy))
        for found in report.predictors
    ]
    head = ["predictor", "guessed", "right", "%"]
    print_table(console, "guesses: as many experts as the layer uses", head, guesses)
    if report.transfer:
        _draw_transfer(report.transfer, console)


def _draw_skew(report: TraceReport, console: Console) -> None:
    shares = [f"{100 * share:.0f} % of uses" for share in SKEW_SHARES]
    head = ["layer", "used at all", *shares, "% by the first"]
    rows = [
        (
            str(layer.layer),
            str(layer.n_used),
            *map(str, layer.n_for_share),
            _percent(layer.top_share),
        )
        for layer in report.skew
    ]
    columns = [
        [layer.n_used for layer in report.skew],
        *[[layer.n_for_share[at] for layer in report.skew] for at in range(len(SKEW_SHARES))],
    ]
    middle = _percent(median(layer.top_share for layer in report.skew))
    rows.append(("median", *[f"{median(column):g}" for column in columns], middle))
    print_table(console, "skew: experts that make up a share of a layer's uses", head, rows)


def _draw_transfer(found: Sequence[Transfer], console: Console) -> None:
    rows = [
        (
            f"{100 * row.hot_share:.0f} %",
            _percent(row.other_covers),
            _percent(row.own_covers),
            _percent(row.common),
        )
        for row in found
    ]
    head = ["of all experts", "% covered by the other's", "% by its own", "% in common"]
    print_table(console, "transfer: uses that a hot set covers", head, rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
