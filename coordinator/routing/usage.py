"""Use counts of experts: which ones a model was seen to use, kept in a file between runs.

    {"format": "moe-coord usage 1", "fingerprint": "…", "counts": {"3": {"17": 12.0, …}, …}}

The file belongs to one model (its fingerprint) and is refused for another. Written anew and moved
into place, so that a run that is killed leaves the old one.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compute_worker.arch import ModelSpec
from coordinator.command.flag_values import ConfigError
from coordinator.core.policies import Key

FORMAT = "moe-coord usage 1"
MAX_FILE_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class UsageCounts:
    """Uses of every expert seen, by (layer, expert), and the model they belong to."""

    fingerprint: str
    n_layers: int
    n_experts: int
    counts: dict[Key, float] = field(default_factory=dict)

    def of_layers(self) -> list[list[float]]:
        """Uses of each layer's experts, of those that were seen."""
        layers: list[list[float]] = [[] for _ in range(self.n_layers)]
        for (layer, _), count in self.counts.items():
            layers[layer].append(count)
        return layers


def fresh_usage(fingerprint: str, spec: ModelSpec) -> UsageCounts:
    """Nothing seen yet."""
    return UsageCounts(fingerprint, spec.n_layers, spec.n_experts)


def read_usage(path: Path, fresh: UsageCounts) -> UsageCounts:
    """Counts of an earlier run; a file that does not exist yet has none. Raises `ConfigError`."""
    data = _read("--usage", path)
    return fresh if data is None else _filled("--usage", path, data, fresh)


def read_hot_set(path: Path, fresh: UsageCounts) -> UsageCounts:
    """Counts in a file that must be there. Raises `ConfigError`."""
    data = _read("--hot-set", path)
    if data is None:
        raise _refusal("--hot-set", path, "a readable file", "none")
    return _filled("--hot-set", path, data, fresh)


def _read(flag: str, path: Path) -> bytes | None:
    """The file's bytes; None where there is no file."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refusal(flag, path, "a readable file", error.strerror or "an error") from error


def _filled(flag: str, path: Path, data: bytes, fresh: UsageCounts) -> UsageCounts:
    if len(data) > MAX_FILE_BYTES:
        raise _refusal(flag, path, f"at most {MAX_FILE_BYTES} bytes", "more")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _refusal(flag, path, "the JSON of use counts", "something else") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _refusal(flag, path, repr(FORMAT), "another format")
    if content.get("fingerprint") != fresh.fingerprint:
        ours = f"counts of this model ({fresh.fingerprint})"
        raise _refusal(flag, path, ours, "those of another")
    fresh.counts.update(_counts(flag, path, content.get("counts"), fresh))
    return fresh


def write_usage(path: Path, usage: UsageCounts) -> None:
    """Save; raises `OSError`."""
    layers: dict[str, dict[str, float]] = {}
    for (layer, expert), count in sorted(usage.counts.items()):
        layers.setdefault(str(layer), {})[str(expert)] = round(count, 6)
    content = {"format": FORMAT, "fingerprint": usage.fingerprint, "counts": layers}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(json.dumps(content))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _counts(flag: str, path: Path, raw: Any, fresh: UsageCounts) -> Mapping[Key, float]:
    found: dict[Key, float] = {}
    if not isinstance(raw, dict):
        raise _refusal(flag, path, "counts by layer", "something else")
    for layer, experts in raw.items():
        if not isinstance(experts, dict):
            raise _refusal(flag, path, "counts by expert", "something else")
        for expert, count in experts.items():
            # short ones only: Python refuses to turn thousands of digits into a number
            is_key = all(text.isdecimal() and len(text) <= 6 for text in (layer, expert))
            is_count = type(count) in (int, float) and 0 <= count < 1e300
            if not is_key or not is_count:
                raise _refusal(flag, path, "a count of 0 or more", f"layer {layer!r:.20}")
            key = (int(layer), int(expert))
            if key[0] >= fresh.n_layers or key[1] >= fresh.n_experts:
                raise _refusal(flag, path, "layers and experts of this model", f"{key}")
            found[key] = float(count)
    return found


def _refusal(flag: str, path: Path, expected: str, found: str) -> ConfigError:
    anew = ", or delete it to start anew" if flag == "--usage" else ""
    return ConfigError(
        f"{flag}: expected {expected} in {str(path)!a:.200}, found {found}; give another file{anew}"
    )
