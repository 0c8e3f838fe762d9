"""Prints deploy/METRICS.md, made from the declarations of the series.

python tests/metrics_table.py > deploy/METRICS.md
"""

from coordinator.metrics.http_totals import TOKEN_BOUNDS_SECONDS
from coordinator.metrics.series import SERIES
from coordinator.processes.totals import READ_BOUNDS_SECONDS

INTRODUCTION = """# Metrics

The service (and with `--metrics-port` any run) serves these on 127.0.0.1:9400 (or on the address of
`--metrics-host`), one page per process at `/metrics/<process>` (`coordinator`, `compute`, `io0`, …,
`http`), which answers 503 while the process is down. `/targets` lists the pages for Prometheus
(`http_sd`); each target has a label `process`. `/metrics` shows all pages in one, for people.
Counters belong to the name of a process: they go on where they were when it is started again.
`prometheus.yml` here scrapes them, `rules/` has recording and alerting rules.

This file is printed by `tests/metrics_table.py`.

"""
FAMILIES = {"all": "every process", "readers": "processes that read", "http": "http (service)"}


def document() -> str:
    """The whole file."""
    rows = ["| Name | Type | Labels | Shown by | Meaning |", "| --- | --- | --- | --- | --- |"]
    for series in SERIES:
        labels = ", ".join(f"`{label}`" for label in series.labels)
        shown_by = FAMILIES.get(series.whose, series.whose)
        rows.append(
            f"| `{series.full_name}` | {series.kind} | {labels} | {shown_by} | {series.help} |"
        )
    reads, tokens = (
        ", ".join(f"{bound:g}" for bound in bounds)
        for bounds in (READ_BOUNDS_SECONDS, TOKEN_BOUNDS_SECONDS)
    )
    bounds = f"Bounds of the histograms of reads, in seconds: {reads}; of tokens: {tokens}."
    return INTRODUCTION + "\n".join(rows) + f"\n\n{bounds}\n"


if __name__ == "__main__":
    print(document(), end="")
