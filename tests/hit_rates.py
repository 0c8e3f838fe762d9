"""Writes `hit_rates.md`: hits of every policy on three texts of different style.

    python tests/hit_rates.py [--check]

Runs the shipped model on `prompts/*.txt` with `--trace`, counts for `static` and `imatrix` from the
other two texts, and replays every policy at 10, 25, 50 and 75 % of the experts: the numbers are
those of live runs (`test_replay.py`). With `--check` the file is compared, not written; another
instruction set may draw another token somewhere, and then differs.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from arms import run_json

from coordinator.command.sizes import PoolSize
from coordinator.core.policies import Key
from coordinator.core.policy_choice import POLICIES
from coordinator.routing.replay_report import Pool, Result, pool_for, results_of
from coordinator.routing.trace_file import Trace, is_prompt, of_steps, read_trace
from coordinator.routing.trace_statistics import use_counts

FOLDER = Path(__file__).parent
TARGET = FOLDER / "hit_rates.md"
TEXTS = tuple(sorted(path.stem for path in (FOLDER / "prompts").glob("*.txt")))
SHARES = (0.10, 0.25, 0.50, 0.75)
N_TOKENS = 256
STATIC_SHARE = 0.25
N_CALIBRATION = 10
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

STATIC_HEAD = f"""\
## What a static hot set is worth

Share of hits in % at {100 * STATIC_SHARE:.0f} % of the experts. The set is what is used most in:
the whole text itself (it knows the future), the first {N_CALIBRATION} tokens of the text's own
answer, the same of another text's; or drawn by lot.
"""


def main() -> int:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    is_check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as name:
        traces = {text: record(text, Path(name)) for text in TEXTS}
    tables = [line for text in TEXTS for line in section(text, traces)]
    written = "\n".join([HEAD, *tables, STATIC_HEAD, *hot_sets(traces)])
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


def hot_sets(traces: dict[str, Trace]) -> Iterator[str]:
    """The table of static hot sets, with `lfu`, which begins with nothing, beside them."""
    yield "| text | all of it | its first tokens | another's first tokens | by lot | lfu |"
    yield "| --- |" + " ---: |" * 5
    first = {name: first_tokens(trace) for name, trace in traces.items()}
    for text, trace in traces.items():
        other = next(name for name in traces if name != text)
        header = trace.header
        keys = [(layer, expert) for layer in header.layers for expert in range(header.n_experts)]
        order = random.Random(1).sample(range(len(keys)), len(keys))
        lot = Counter(dict(zip(keys, order, strict=True)))
        pool = pool_for(trace, PoolSize(share=STATIC_SHARE))
        begun = [use_counts(trace.needs), first[text], first[other], lot]
        results = [last_result(trace, pool, "static", uses) for uses in begun]
        results.append(last_result(trace, pool, "lfu", {}))
        shares = [100 * result.outcome.all.hit_rate for result in results]
        yield f"| {text} | " + " | ".join(f"{share:.1f}" for share in shares) + " |"
    yield ""


def last_result(trace: Trace, pool: Pool, policy: str, begun: Mapping[Key, float]) -> Result:
    """Of the policy; the limits stand before it."""
    return list(results_of(trace, pool, [policy], {policy: begun}))[-1]


def first_tokens(trace: Trace) -> Counter[Key]:
    """Uses by the first tokens of an answer."""
    steps = [step for step in of_steps(trace.needs) if not is_prompt(step[0])]
    return use_counts([need for step in steps[:N_CALIBRATION] for need in step])


def cell(result: Result) -> str:
    """Hits and their share."""
    found = result.outcome.all
    return f"{found.hits} ({100 * found.hit_rate:.1f})"


if __name__ == "__main__":
    sys.exit(main())
