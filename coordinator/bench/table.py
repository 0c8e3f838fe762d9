"""The lines that `bench` prints: one while each block ends, and the table when all have."""

from collections.abc import Sequence

from coordinator.bench.limits import shares
from coordinator.bench.records import Record, by_round
from coordinator.bench.rooms import WHOLE_MACHINE
from coordinator.bench.statistics import Ratio, median, paired_ratio

MB = 1e6
HEAD = (
    "arm", "blocks", "tokens/s", "ratio [95 %]", "prompt tokens/s", "ratio [95 %]",
    "MB/token", "ratio", "peak MiB", "limit hits",
)  # fmt: skip
SHARES = {"serial": "of serial limit", "overlapped": "of overlapped limit"}  # see `limits`
NOTHING = "–"
SMALLEST_BYTES = 100_000  # per token; a ratio to less says nothing


def block_line(record: Record, n_done: int, n_all: int | None) -> str:
    """What became of one block."""
    of_all = f"/{n_all}" if n_all is not None else ""
    room = "" if record["room"] == WHOLE_MACHINE else f" with {record['room']}"
    start: str = f"[{n_done}{of_all}] {record['arm']}{room}: "
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
    """Medians of each arm and its paired ratios to the reference."""
    rows = [HEAD, *table_rows(records, arms, reference)]
    if any(shares(record) for record in records):
        of_limits = [tuple(SHARES.values()), *(_share_cells(records, arm) for arm in arms)]
        rows = [(*row, *more) for row, more in zip(rows, of_limits, strict=True)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.append(f"Medians; ratios are medians of pairs, each arm ÷ {reference}.")
    return "\n".join(lines)


def cache_line(records: Sequence[Record]) -> str:
    """What was done to the page cache before the blocks; empty without blocks."""
    found = dict.fromkeys(record["cache"] for record in records if record.get("cache"))
    return f"Page cache before each block: {'; '.join(found)}." if found else ""


def table_rows(
    records: Sequence[Record], arms: Sequence[str], reference: str
) -> list[tuple[str, ...]]:
    """The cells below `HEAD`, a row per arm."""
    return [_row(records, arm, reference) for arm in arms]


def _share_cells(records: Sequence[Record], arm: str) -> tuple[str, ...]:
    """Medians of the shares of both limits."""
    found = [shares(record) for record in records if record["arm"] == arm]
    medians = [median([each[key] if each else None for each in found]) for key in SHARES]
    return tuple(NOTHING if share is None else f"{share:.2f}" for share in medians)


def _row(records: Sequence[Record], arm: str, reference: str) -> tuple[str, ...]:
    ours = [record for record in records if record["arm"] == arm]
    n_good = sum("error" not in record for record in ours)

    def both(*path: str) -> tuple[list[float | None], list[float | None]]:
        return by_round(records, arm, path), by_round(records, reference, path)

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


def _shown(ratio: Ratio | None) -> str:
    if ratio is None:
        return NOTHING
    if ratio.low is None or ratio.high is None:
        return f"{ratio.median:.2f}"
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
