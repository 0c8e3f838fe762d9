"""The lines that `bench` prints: one while each block ends, and the table when all have."""

from collections.abc import Sequence
from typing import Any

from coordinator.bench_statistics import Ratio, drift, median, paired_ratio

Record = dict[str, Any]
MB = 1e6
HEAD = (
    "arm", "blocks", "tokens/s", "ratio [95 %]", "prompt tokens/s", "ratio [95 %]",
    "MB/token", "ratio", "peak MiB", "limit hits",
)  # fmt: skip
NOTHING = "–"
SMALLEST_BYTES = 100_000  # per token; a ratio to less says nothing
FOREIGN_BYTES = 16 * 1024 * 1024  # less than this is not worth a word
DECIDES_TOKENS = ("model", "numerics", "kernels", "kv-type")


def block_line(record: Record, n_done: int, n_all: int) -> str:
    """What became of one block."""
    start: str = f"[{n_done}/{n_all}] {record['arm']}: "
    if "error" in record:
        return f"{start}{record['error']}"
    per_token = record["bytes"]["per_token"]
    parts = [
        f"{record['tok_s']:.2f} tokens/s" if record["tok_s"] else "",
        f"prompt {record['prompt_tok_s']:.1f} tokens/s" if record["prompt_tok_s"] else "",
        f"{per_token / MB:.1f} MB/token" if per_token is not None else "",
        f"{record['wall_s']:.1f} s, others kept {record['others_cores']:.1f} cores busy",
    ]
    return start + ", ".join(part for part in parts if part)


def table(records: Sequence[Record], arms: Sequence[str], reference: str) -> str:
    """Medians of each arm and its paired ratios to the reference, with what to be wary of."""
    rows = [HEAD, *(_row(records, arm, reference) for arm in arms)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.append(f"Medians; ratios are medians of pairs, each arm ÷ {reference}.")
    return "\n".join([*lines, *_warnings(records, arms)])


def _row(records: Sequence[Record], arm: str, reference: str) -> tuple[str, ...]:
    ours = [record for record in records if record["arm"] == arm]
    n_good = sum("error" not in record for record in ours)

    def both(*path: str) -> tuple[list[float | None], list[float | None]]:
        return _by_round(records, arm, path), _by_round(records, reference, path)

    def shown_ratio(*path: str) -> str:
        return NOTHING if arm == reference else _shown(paired_ratio(*both(*path)))

    rate, prompt, n_bytes = (
        median(both(*path)[0]) for path in (("tok_s",), ("prompt_tok_s",), ("bytes", "per_token"))
    )
    peak = median([record["memory"]["peak_bytes"] for record in ours])
    hits = median([record["memory"]["limit_hits"] for record in ours])
    bytes_of_both = both("bytes", "per_token")
    is_reading = (median(bytes_of_both[1]) or 0) >= SMALLEST_BYTES
    ratio = NOTHING
    if arm != reference and is_reading:
        ratio = _shown(paired_ratio(*bytes_of_both))
    return (
        arm,
        str(n_good) if n_good == len(ours) else f"{n_good} of {len(ours)}",
        NOTHING if rate is None else f"{rate:.2f}",
        shown_ratio("tok_s"),
        NOTHING if prompt is None else f"{prompt:.1f}",
        shown_ratio("prompt_tok_s"),
        NOTHING if n_bytes is None else f"{n_bytes / MB:.1f}",
        ratio.partition(" ")[0],
        NOTHING if peak is None else f"{peak / 2**20:.0f}",
        NOTHING if hits is None else f"{hits:.0f}",
    )


def _by_round(records: Sequence[Record], arm: str, path: Sequence[str]) -> list[float | None]:
    """A value of each round, None where the block failed or is not there."""
    n_rounds = 1 + max((record["round"] for record in records), default=-1)
    values: list[float | None] = [None] * n_rounds
    for record in records:
        if record["arm"] == arm and "error" not in record:
            value: Any = record
            for key in path:
                value = value[key]
            values[record["round"]] = value
    return values


def _shown(ratio: Ratio | None) -> str:
    if ratio is None:
        return NOTHING
    if ratio.low is None or ratio.high is None:
        return f"{ratio.median:.2f}"
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _warnings(records: Sequence[Record], arms: Sequence[str]) -> list[str]:
    lines = []
    for arm in arms:
        change = drift(_by_round(records, arm, ("tok_s",)))
        if change is not None:
            lines.append(
                f"warning: {arm}: the second half of its blocks ran {change:+.0%} against the first"
            )
    foreign = {record["arm"] for record in records if _is_foreign(record)}
    for arm in sorted(foreign):
        lines.append(
            f"warning: {arm}: pages of the model were cached that its block was not charged for: "
            "something else reads the file; use a copy of your own"
        )
    for n_round in sorted(_rounds_with_different_tokens(records)):
        lines.append(
            f"warning: round {n_round}: arms that should draw the same tokens drew different ones"
        )
    return lines


def _is_foreign(record: Record) -> bool:
    """Whether pages of the model lay in the cache that the block was not charged for."""
    own = record["memory"]["file_cache_bytes"]
    if own is None or record["cache"] == "kept":
        return False
    not_own = max(record["cached_before"], record["cached_after"] - own)
    return bool(not_own > FOREIGN_BYTES)


def _rounds_with_different_tokens(records: Sequence[Record]) -> set[int]:
    """Rounds in which arms of the same model and arithmetic disagree: no setting may do that."""
    seen: dict[tuple[Any, ...], list[int]] = {}
    found = set()
    for record in records:
        if record.get("tokens"):
            settings = record["report"].get("settings", {})
            arithmetic = tuple(settings.get(name) for name in DECIDES_TOKENS)
            tokens = seen.setdefault((record["round"], *arithmetic), record["tokens"])
            if tokens != record["tokens"]:
                found.add(record["round"])
    return found
