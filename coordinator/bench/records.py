"""Lines of blocks.jsonl, one per block: written as blocks end, read back to go on or to answer.

Rules to keep: a line is whole or it is not there. A run that is killed while it writes leaves a
part of a line; the next one cuts it off. And what is compared has run together: `run` counts the
starts of the command, and of a round only the blocks of the last start count. One writes at a time.
"""

import contextlib
import fcntl
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from coordinator.bench.block_shape import REQUIRED, wrong_field
from coordinator.command.flag_values import ConfigError

Record = dict[str, Any]
BLOCKS = "blocks.jsonl"
SAME = ("machine", "disk", "file_system", "versions")  # where a comparison is continued
SAME_KIB = 0.01  # of a size: what the kernel keeps for itself is not the same after each boot
MAX_BYTES = 1 << 30
FOREIGN_BYTES = 16 * 1024 * 1024  # less than this is not worth a word


class BlocksFile:
    """Appends records to a file, each at once; `done` are those that were there."""

    def __init__(self, file: TextIO, done: Sequence[Record]) -> None:
        self.done = tuple(done)
        self._file = file

    def add(self, record: Record) -> None:
        """Write one more. In ASCII: a path in it may be no text at all."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_blocks(folder: Path, common: Record) -> BlocksFile:
    """The file in a folder, which is made; what it holds is `done`. `common`: of the lines to come.

    Raises `ConfigError` for a path that cannot be used, one that another run writes to, and for
    lines of another comparison, or from another machine, disk or version.
    """
    make_folder(folder)
    path = folder / BLOCKS
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("a", encoding="utf-8"))
            # before it is read: what looks like a cut line may be on its way
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = read_blocks(path, cut=True)
            for record in done:
                _check_same(record, common, path)
            stack.pop_all()
            return BlocksFile(file, done)
    except BlockingIOError as error:
        raise ConfigError(
            f"--out: expected a folder that nobody else writes to, found a comparison that runs "
            f"and keeps its blocks in {str(folder)!a:.200}; wait for its end, or give another path"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"--out: expected a folder that can be written, found {str(folder)!a:.200}: "
            f"{error.strerror}; give another path"
        ) from error


def _check_same(record: Record, common: Record, path: Path) -> None:
    """Raises `ConfigError`. What one of the two does not tell is not compared."""
    if record["comparison"] != common["comparison"]:
        raise ConfigError(
            "--out: expected a new folder, or one of the same comparison "
            f"({common['comparison']}), found blocks of {record['comparison']!a:.40} in "
            f"{str(path)!a:.200}; give another folder"
        )
    for part in SAME:
        before, now = record.get(part) or {}, common.get(part) or {}
        for name in now:
            if not _is_same(before.get(name), now[name], name):
                raise ConfigError(
                    f"--out: expected a new folder, or one of this machine, disk and version, "
                    f"found blocks with {part} {name} {before[name]!a:.80} in {str(path)!a:.200}, "
                    f"here it is {now[name]!a:.80}; give another folder"
                )


def _is_same(before: Any, now: Any, name: str) -> bool:
    if before is None or now is None:
        return True
    if name.endswith("_kib") and isinstance(before, int) and isinstance(now, int):
        return abs(before - now) <= SAME_KIB * max(before, now)
    return bool(before == now)


def make_folder(folder: Path) -> None:
    """The folder of `--out`. Raises `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out: expected a folder that can be made, found {str(folder)!a:.200}: "
            f"{error.strerror}; give another path"
        ) from error


def read_blocks(path: Path, *, cut: bool = False) -> list[Record]:
    """All whole lines that count; with `cut` a part of one at the end is removed from the file.

    Raises `ConfigError` for a file that does not hold blocks, `OSError` for one that is not there.
    """
    if path.stat().st_size > MAX_BYTES:
        raise _refusal(path, f"more than {MAX_BYTES} bytes")
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if cut and len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    records = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise _refusal(path, f"something else in line {number}") from None
        if not isinstance(record, dict) or not set(REQUIRED) <= record.keys():
            raise _refusal(path, f"something else in line {number}")
        wrong = wrong_field(record)
        if wrong is not None:
            raise _refusal(path, f"{wrong} in line {number}")
        records.append(record)
    return together(records)


def together(records: Sequence[Record]) -> list[Record]:
    """Of each round what was measured at the last start of the command that came to it."""
    last: dict[int, int] = {}
    for record in records:
        last[record["round"]] = max(last.get(record["round"], 0), run_of(record))
    return [record for record in records if run_of(record) == last[record["round"]]]


def run_of(record: Record) -> int:
    """At which start of the command it was measured; lines of older versions do not say."""
    found: int = record.get("run", 0)
    return found


def value_of(record: Record, path: Sequence[str]) -> Any:
    """A value deep inside; None where it is not there."""
    found: Any = record
    for key in path:
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found


def in_room(records: Iterable[Record], room: str) -> list[Record]:
    """The blocks of one room."""
    return [record for record in records if record["room"] == room]


def by_round(records: Iterable[Record], arm: str, path: Sequence[str]) -> list[float | None]:
    """A value of each round, None where the block failed, is not there, or had help."""
    records = list(records)
    n_rounds = 1 + max((record["round"] for record in records), default=-1)
    values: list[float | None] = [None] * n_rounds
    for record in records:
        if record["arm"] == arm and "error" not in record and not is_foreign(record):
            values[record["round"]] = value_of(record, path)
    return values


def has_failed(record: Record) -> bool:
    """Whether it must be measured again. A block that was killed for its memory need not: that it
    does not fit is what was measured, and it would not fit again."""
    return "error" in record and not record["memory"].get("oom_kills")


def is_foreign(record: Record) -> bool:
    """Whether pages of the model lay in the cache that the block was not charged for.

    Who reads past the page cache has nothing of them. Its dense weights are read before the tokens
    that count. Without a control group nobody is charged, and only what lay there before tells.
    """
    own = value_of(record, ("memory", "file_cache_bytes"))
    settings = value_of(record, ("report", "settings")) or {}
    is_past_cache = settings.get("reader") == "direct" and settings.get("dense") != "mapped"
    if is_past_cache or record.get("cache") == "kept":
        return False
    not_own = record.get("cached_before") or 0
    if own is not None:
        not_own = max(not_own, (record.get("cached_after") or 0) - own)
    return bool(not_own > FOREIGN_BYTES)


def _refusal(path: Path, found: str) -> ConfigError:
    return ConfigError(
        f"--merge: expected a {BLOCKS} that `bench --out` wrote, found {found} in "
        f"{str(path)!a:.200}; give another file"
    )
