"""The files of `deploy/` as tests read them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coordinator.metrics.one_series import PREFIX
from coordinator.metrics.series import SERIES

DEPLOY = Path(__file__).parent.parent / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "moe-coord.json"


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panel_queries() -> Iterator[tuple[str, str]]:
    """Title of the panel and query, variables filled in, of everything that the dashboard shows."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
            yield panel["title"], text


def exported_names() -> set[str]:
    """Every name that a scrape can have."""
    names = {series.full_name for series in SERIES}
    for series in SERIES:
        if series.kind == "histogram":
            names |= {f"{series.full_name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def recorded_names() -> set[str]:
    """Every name that a recording rule makes."""
    text = (DEPLOY / "rules" / "recording.rules.yml").read_text()
    return set(re.findall(r"- record: (\S+)", text))


def names_in(expression: str) -> set[str]:
    """Our metrics that a query uses."""
    return set(re.findall(rf"\b{PREFIX[:-1]}[_:][\w:]+", expression))
