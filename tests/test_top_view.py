"""What `moe-coord top` shows of a status."""

import copy
from typing import Any

import pytest
from rich.text import Text

from coordinator.serving.top_view import LOADING, Earlier, one_line, view

MiB = 1024 * 1024
STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "state": "ready",
    "uptime_seconds": 3725.2,
    "model": {
        "name": "m[bold]", "architecture": "olmoe", "n_layers": 3, "n_experts": 8, "n_active": 2,
        "n_context": 1024,
    },
    "settings": {
        "io_workers": 1, "io_threads": 0, "reader": "direct", "policy": "lfu", "prefetch": "off",
        "numerics": "fast", "kernels": None, "kv_type": "f16", "parallel": 4, "queue": 16,
    },
    "recent": {
        "seconds": 10.0, "tokens_per_second": 12.34, "prompt_tokens_per_second": 5.0,
        "hit_rate": 0.5, "mib_per_token": 1.5,
        "token_seconds": {"compute": 0.03, "disk": 0.01, "coordination": 0.001},
    },
    "totals": {
        "prompt_tokens": 4, "generated_tokens": 40, "expert_requests": 100, "expert_hits": 25,
        "bytes_read": 10 * MiB, "evictions": 7, "requests": {}, "seconds": {},
    },
    "slots": [
        {"slot_bytes": MiB, "layers": [0, 2], "free": 1, "loading": 2, "ready": 3, "condemned": 0,
         "retired": 4},
    ],
    "experts": {
        "layers": [0, 1, 2],
        "states": ["r.......", "...l....", ".......r"],
        "uses": [[9, 0, 0, 0, 0, 0, 0, 0], [0] * 8, [0, 0, 0, 0, 0, 0, 0, 1]],
    },
    "processes": [
        {"name": "coordinator", "pid": 1, "is_up": True, "cores": [0, 1], "resident_bytes": 5 * MiB,
         "cpu_seconds": 3.0, "restarts": 0},
        {"name": "io0", "pid": None, "is_up": False, "cores": [1], "resident_bytes": None,
         "cpu_seconds": None, "restarts": 3},
    ],
    "memory": {
        "budget_bytes": 100 * MiB, "accounted_bytes": 50 * MiB, "peak_bytes": 60 * MiB, "parts": {},
        "pool_bytes": 0, "kv": {},
    },
    "requests": {
        "running": 1, "queued": 0, "parallel": 4, "queue": 16,
        "list": [{"phase": "prompt", "prompt_tokens": 90, "done_tokens": 30, "tokens": 0,
                  "seconds": 2.0}],
    },
}  # fmt: skip


def shown(
    status: dict[str, Any] = STATUS,
    size: tuple[int, int] = (100, 40),
    earlier: Earlier | None = None,
    *,
    has_colour: bool = False,
) -> Text:
    return view(status, "http://x", earlier, 20.0, size, has_colour=has_colour)


@pytest.mark.parametrize(
    "text",
    [
        "m[bold] ● ready for 1 h 2 min at http://x",
        "olmoe, 3 layers × 8 experts, 2 per token; context 1024; 1 I/O worker(s), direct, lfu,",
        "12.3 tokens/s   50.0 % hit rate   1.50 MiB/token read",
        "since the start: 40 tokens, hit rate 25.0 %, 10.0 MiB read, 7 evictions",
        "compute 30.0 ms  disk 10.0 ms  coordination 1.0 ms",
        "experts: 2 of 24 resident, 1 loading",
        "   1 ......ll........\n",
        "slots of 1.00 MiB: 3 ready, 2 loading, 1 free, 4 given back; 2 layers",
        "memory 50.0 MiB of 100 MiB (highest 60.0 MiB) ██████████░░░░░░░░░░\n",
        "requests: 1 of 4 running, 0 of 16 waiting\n  prompt  prompt 30/90, 0 tokens, 2 s",
    ],
)
def test_what_is_shown(text: str) -> None:
    assert text in shown().plain


def test_processes() -> None:
    rows = [
        line.split()
        for line in shown(earlier=Earlier({"coordinator": 2.0}, 18.0)).plain.split("\n")
    ]
    assert ["coordinator", "0,1", "50", "%", "5.00", "MiB", "0"] in rows
    assert ["io0", "1", "down", "3"] in rows


def test_colours_of_the_map() -> None:
    text = shown(has_colour=True)
    cells = [
        (text.plain[span.start : span.end], str(span.style))
        for span in text.spans
        if "█" in text.plain[span.start : span.end] and str(span.style).startswith("#")
    ]
    colours = [colour for _, colour in cells[-24:]]
    assert colours[8 + 3] == LOADING
    assert len({colours[0], colours[1], colours[23]}) == 3  # much used, on the disk, hardly used
    assert "r resident" not in text.plain


@pytest.mark.parametrize("size", [(80, 24), (40, 24), (200, 60)])
def test_a_large_model_fits(size: tuple[int, int]) -> None:
    status = copy.deepcopy(STATUS)
    status["experts"] = {
        "layers": list(range(48)),
        "states": ["." * 127 + "r"] * 48,
        "uses": [[0] * 127 + [1]] * 48,
    }
    lines = shown(status, size).plain.split("\n")
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]
    rows = [line for line in lines if line.strip().endswith("r") and "...." in line]
    assert rows and all(line.endswith("r") for line in rows)  # the last column is there


def test_what_is_not_known() -> None:
    status = copy.deepcopy(STATUS)
    status["recent"] |= {"hit_rate": None, "mib_per_token": None, "token_seconds": None}
    status["totals"]["expert_hits"] = None
    status |= {"experts": None, "slots": []}
    plain = shown(status).plain
    assert "– hit rate   – MiB/token read" in plain
    assert "no token lately" in plain and "the page cache holds the experts" in plain
    assert one_line(status).startswith("ready; 12.3 tokens/s; hit rate –; – MiB/token;")
