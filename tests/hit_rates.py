"""Writes `hit_rates.md`: hits of every policy on three texts of different style.

    python tests/hit_rates.py [--check]

Runs the shipped model on `prompts/*.txt` with `--trace`, counts for `static` and `imatrix` from the
other two texts, and replays every policy at 10, 25, 50 and 75 % of the experts: the numbers are
those of live runs (`test_replay.py`). With `--check` the file is compared, not written; another
instruction set may draw another token somewhere, and then differs.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from arms import run_json

from coordinator.policies import Key
from coordinator.policy_choice import POLICIES
from coordinator.replay_report import Result, pool_for, results_of
from coordinator.sizes import PoolSize
from coordinator.trace_file import Trace, read_trace
from coordinator.trace_statistics import use_counts

FOLDER = Path(__file__).parent
TARGET = FOLDER / "hit_rates.md"
TEXTS = tuple(sorted(path.stem for path in (FOLDER / "prompts").glob("*.txt")))
SHARES = (0.10, 0.25, 0.50, 0.75)
N_TOKENS = 256
FLAGS = ("--temperature", "0.8", "--top-p", "0.95", "--seed", "1", "--ignore-eos",
         "--numerics", "exact")  # fmt: skip
HEAD = f"""\
# Hits of every policy

Experts that were in the pool when they were needed, of all requests (prompt and {N_TOKENS} tokens),
and their share in %. The shipped model (8 layers of 16 experts, 2 used per token: the token cycle
is 12.5 % of the experts), three texts in `tests/prompts`. `static` and `imatrix` begin with the
counts of the other two texts; all others begin with nothing. `belady` knows what comes: nothing
hits more. `page cache` drops what was used longest ago, in as many bytes as the pool has; the pool
pays 12 % more per expert for the alignment of these small slabs (3 % from 1 MiB on).

    python tests/hit_rates.py
"""


def main() -> int:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    is_check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as name:
        traces = {text: record(text, Path(name)) for text in TEXTS}
    written = "\n".join([HEAD, *[line for text in TEXTS for line in section(text, traces)]])
    if is_check:
        return 0 if TARGET.read_text() == written else 1
    TARGET.write_text(written)
    return 0


def record(text: str, folder: Path) -> Trace:
    """The routing of a text and its answer."""
    path = folder / f"{text}.trace"
    prompt = FOLDER / "prompts" / f"{text}.txt"
    run_json("-f", str(prompt), "-n", str(N_TOKENS), *FLAGS, "--trace", str(path))
    return read_trace(path)


def section(text: str, traces: dict[str, Trace]) -> Iterator[str]:
    """The table of one text."""
    others: Counter[Key] = Counter()
    for name, trace in traces.items():
        if name != text:
            others.update(use_counts(trace.needs))
    rows: dict[str, list[str]] = {}
    n_slots = []
    for share in SHARES:
        pool = pool_for(traces[text], PoolSize(share=share))
        n_slots.append(pool.layout.n_slots)
        counts = {name: others if name in ("static", "imatrix") else {} for name in POLICIES}
        for result in results_of(traces[text], pool, list(POLICIES), counts):
            rows.setdefault(result.policy, []).append(cell(result))
    heads = [f"{100 * share:.0f} %: {n} slots" for share, n in zip(SHARES, n_slots, strict=True)]
    n_requests = sum(len(need.experts) for need in traces[text].needs)
    yield f"## {text}: {n_requests} requests\n"
    yield f"| | {' | '.join(heads)} |"
    yield "| --- |" + " ---: |" * len(heads)
    for policy, cells in rows.items():
        yield f"| {policy} | {' | '.join(cells)} |"
    yield ""


def cell(result: Result) -> str:
    """Hits and their share."""
    found = result.outcome.all
    return f"{found.hits} ({100 * found.hit_rate:.1f})"


if __name__ == "__main__":
    sys.exit(main())
