"""Whether the rounds of several files may stand side by side: what each compared, and how.

Rule to keep: a setting that a file does not tell is not compared, so that lines of older versions
can be read. The seed may differ: it draws other prompts of the same kind.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.bench.records import Record
from coordinator.command.flag_values import ConfigError

OF_ALL = (
    "fingerprints", "disk_bytes_per_second", "read_ahead_kib", "nice", "keep_cache", "tokens",
    "warm_up", "prompt_tokens", "compute_threads",
)  # fmt: skip
OF_ROOM = ("cap_bytes", "room_flags")
# their values are other prompts, and other places of a model whose fingerprint is compared
FREE_FLAGS = ("--model", "-m", "--tokens", "--seed")
N_SHOWN_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Run:
    """The blocks of one file."""

    path: Path
    records: Sequence[Record]


def distinct_runs(runs: Sequence[Run]) -> list[Run]:
    """Each run once. Files that share a block are states of one run: the longest of them counts."""
    kept: list[tuple[Run, set[str]]] = []
    for run in runs:
        texts = {json.dumps(record, sort_keys=True): record for record in run.records}
        lines = set(texts)
        same = [at for at, (_, known) in enumerate(kept) if known & lines]
        if any(len(kept[at][1]) >= len(lines) for at in same):
            continue
        kept = [each for at, each in enumerate(kept) if at not in same]
        kept.append((Run(run.path, list(texts.values())), lines))
    return [run for run, _ in kept]


def check_comparable(runs: Sequence[Run]) -> None:
    """Raises `ConfigError` for the first setting that two of them do not share."""
    known: dict[str, tuple[str, Path]] = {}
    for run in runs:
        for record in run.records:
            for name, value in _compared(record):
                text = json.dumps(value)
                before, path = known.setdefault(name, (text, run.path))
                if text != before:
                    raise ConfigError(
                        f"--merge: expected the same {name[:N_SHOWN_CHARACTERS]} in all files of a "
                        f"kind of hardware, found {_shown(before)} in {str(path)!a:.200} and "
                        f"{_shown(text)} in {str(run.path)!a:.200}; merge them apart"
                    )


def _compared(record: Record) -> Iterator[tuple[str, Any]]:
    """Names and values of what must be equal; names tell what they are of."""
    settings, room, arm = record["settings"], record["room"], record["arm"]
    for name in OF_ALL:
        if name in settings:
            yield name.replace("_", " "), settings[name]
    for name in OF_ROOM:
        if name in settings:
            yield f"{name.replace('_', ' ')} of room {room!a}", settings[name]
    if isinstance(record.get("command"), list):
        yield f"flags of arm {arm!a} in room {room!a}", _flags(record["command"])


def _flags(command: Sequence[Any]) -> list[str]:
    """Without the program's own path, folders, and what changes with each round."""
    words = [str(word).rpartition("/")[2] for word in command]
    return [word for before, word in itertools.pairwise(words) if before not in FREE_FLAGS]


def _shown(text: str) -> str:
    shown = ascii(text)[1:-1]
    return shown if len(shown) <= N_SHOWN_CHARACTERS else f"{shown[:N_SHOWN_CHARACTERS]}…"
