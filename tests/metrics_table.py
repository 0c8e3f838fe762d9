"""Prints deploy/METRICS.md, made from the declarations of the series.

python tests/metrics_table.py > deploy/METRICS.md
"""

from coordinator.series import SERIES
from coordinator.totals import READ_BOUNDS_SECONDS

INTRODUCTION = """# Metrics

`moe-coord --metrics-port 9400` serves these on 127.0.0.1, one page per process at
`/metrics/<process>` (`coordinator`, `compute`, `io0`, …), which answers 503 while the process is
down. `/targets` lists the pages for Prometheus (`http_sd`); each target has a label `process`.
`/metrics` shows all pages in one, for people. Counters belong to the name of a process: they go on
where they were when it is started again. `prometheus.yml` here scrapes them, `rules/` has
recording and alerting rules.

This file is printed by `tests/metrics_table.py`.

"""
FAMILIES = {"all": "every process", "readers": "processes that read"}


def document() -> str:
    """The whole file."""
    rows = ["| Name | Type | Labels | Shown by | Meaning |", "| --- | --- | --- | --- | --- |"]
    for series in SERIES:
        labels = ", ".join(f"`{label}`" for label in series.labels)
        shown_by = FAMILIES.get(series.whose, series.whose)
        rows.append(
            f"| `{series.full_name}` | {series.kind} | {labels} | {shown_by} | {series.help} |"
        )
    bounds = ", ".join(f"{bound:g}" for bound in READ_BOUNDS_SECONDS)
    return INTRODUCTION + "\n".join(rows) + f"\n\nBounds of the histograms, in seconds: {bounds}.\n"


if __name__ == "__main__":
    print(document(), end="")
