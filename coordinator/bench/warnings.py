"""What to be wary of in the blocks of a comparison. Functions of records."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from coordinator.bench.records import Record, by_round, in_room, is_foreign, value_of
from coordinator.bench.rooms import WHOLE_MACHINE
from coordinator.bench.statistics import MIN_DRIFT_VALUES, drift

DECIDES_TOKENS = ("model", "numerics", "kernels", "kv-type")
THROTTLED_SHARE = 0.8  # of the rate of the first blocks
HOT_C = 90.0
SYNTHETIC = "synthetic-"


def warnings_of(records: Sequence[Record]) -> list[str]:
    """One line each: drift, a disk or a processor that slows down, help from others, mixtures."""
    lines: list[str] = []
    for room in dict.fromkeys(record["room"] for record in records):
        mine = in_room(records, room)
        where = "" if room == WHOLE_MACHINE else f" with {room}"
        for arm in dict.fromkeys(record["arm"] for record in mine):
            lines += _of_arm(mine, arm, f"{arm}{where}")
        for n_round in sorted(rounds_with_different_tokens(mine)):
            lines.append(
                f"round {n_round}{where}: arms that should draw the same tokens drew different ones"
            )
    return [*lines, *_of_machine(records)]


def _of_arm(records: Sequence[Record], arm: str, name: str) -> Iterator[str]:
    change = drift(by_round(records, arm, ("tok_s",)))
    if change is not None:
        yield f"{name}: the second half of its blocks ran {change:+.0%} against the first"
    mine = [record for record in records if record["arm"] == arm]
    if any(map(is_foreign, mine)):
        yield (
            f"{name}: pages of the model were cached that its block was not charged for: something "
            "else reads the file; these blocks are left out; --copy always measures on a copy"
        )
    rates = [rate for record in mine if (rate := disk_rate(record)) is not None]
    if len(rates) >= MIN_DRIFT_VALUES:
        half = len(rates) // 2
        first, second = median(rates[:half]), median(rates[-half:])
        if second < THROTTLED_SHARE * first:
            yield (
                f"{name}: the disk may throttle: {second / 1e6:.0f} MB per second of waiting in "
                f"the second half, {first / 1e6:.0f} in the first"
            )
    n_failed = sum("error" in record for record in mine)
    if n_failed:
        yield f"{name}: {n_failed} of {len(mine)} blocks failed"


def _of_machine(records: Sequence[Record]) -> Iterator[str]:
    hottest = [value_of(record, ("after", "hottest_c")) for record in records]
    known = [degrees for degrees in hottest if degrees is not None]
    if known and max(known) >= HOT_C:
        yield f"the processor became {max(known):.0f} °C hot: it may run slower than it can"
    throttled = [value_of(record, (when, "throttle_count")) for record in records
                 for when in ("before", "after")]  # fmt: skip
    counts = [count for count in throttled if count is not None]
    if counts and max(counts) > min(counts):
        yield f"the processor was throttled {max(counts) - min(counts)} times meanwhile"
    mains = {value_of(record, ("before", "on_mains")) for record in records}
    if False in mains:
        yield "on battery: the processor may run slower than on mains"
    cores = [record.get("others_cores") for record in records]
    others = [found for found in cores if found is not None]
    if others and median(others) > 0.25:
        yield f"other programs kept {median(others):.1f} cores busy meanwhile: read ratios only"
    for what in ("versions", "machine"):
        if len({repr(record.get(what)) for record in records}) > 1:
            yield f"the blocks are of different {what}"
    names = value_of(records[0], ("settings", "model_names")) if records else None
    if names and str(names[0]).startswith(SYNTHETIC):
        yield "random weights: bytes and arithmetic are the real model's, its routing is not"


def disk_rate(record: Record) -> float | None:
    """Bytes read ÷ seconds that compute waited; None where it hardly did.

    More than the disk gives, since it also reads while compute works; only its change tells.
    """
    n_bytes = value_of(record, ("bytes", "per_token"))
    wait = value_of(record, ("report", "token_time", "wait_disk_s"))
    total = record.get("measured_s")
    n_tokens = record.get("measured_tokens")
    if not n_bytes or not wait or not total or not n_tokens or wait < 0.1 * total / n_tokens:
        return None
    rate: float = n_bytes / wait
    return rate


def rounds_with_different_tokens(records: Sequence[Record]) -> set[int]:
    """Rounds in which arms of the same model and arithmetic disagree: no setting may do that."""
    seen: dict[tuple[Any, ...], list[int]] = {}
    found = set()
    for record in records:
        if record.get("tokens"):
            settings = value_of(record, ("report", "settings")) or {}
            arithmetic = tuple(settings.get(name) for name in DECIDES_TOKENS)
            tokens = seen.setdefault((record["round"], *arithmetic), record["tokens"])
            if tokens != record["tokens"]:
                found.add(record["round"])
    return found
