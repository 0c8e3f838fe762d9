"""What a line of blocks.jsonl must look like: the fields that others go by, and their kinds.

Lines come from other machines and through other hands. A field that is not named here is shown or
compared as it is, never computed with. Versions before this one may leave out what is not REQUIRED.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

REQUIRED = ("round", "arm", "room", "comparison", "memory", "bytes", "settings", "machine")
MAX_ROUND = 10**6


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(each) is kind for each in value)


COUNT, NUMBER, TEXT, FLAG = "a count", "a number", "a text", "true or false"
IDS, TEXTS, SPANS = "a list of token ids", "a list of texts", "a list of pairs of numbers"
KINDS: Mapping[str, Callable[[Any], bool]] = {
    COUNT: lambda value: type(value) is int,
    NUMBER: _is_number,
    TEXT: lambda value: type(value) is str,
    FLAG: lambda value: type(value) is bool,
    IDS: _is_list_of(int),
    TEXTS: _is_list_of(str),
    SPANS: lambda value: isinstance(value, list)
    and all(isinstance(each, list) and len(each) == 2 and all(map(_is_number, each))
            for each in value),
}  # fmt: skip
_STATE: Mapping[str, Any] = {"hottest_c": NUMBER, "throttle_count": NUMBER, "on_mains": FLAG}
SHAPE: Mapping[str, Any] = {
    "round": COUNT, "run": COUNT, "arm": TEXT, "room": TEXT, "comparison": TEXT, "cache": TEXT,
    "tok_s": NUMBER, "prompt_tok_s": NUMBER, "measured_s": NUMBER, "measured_tokens": NUMBER,
    "others_cores": NUMBER, "cached_before": NUMBER, "cached_after": NUMBER,
    "tokens": IDS, "spans": SPANS,
    "bytes": {"per_token": NUMBER},
    "memory": {
        "file_cache_bytes": NUMBER, "peak_bytes": NUMBER, "limit_hits": NUMBER,
        "oom_kills": NUMBER,
    },
    "settings": {"expert_bytes": NUMBER, "cap_bytes": NUMBER, "model_names": TEXTS},
    "report": {
        "settings": {
            "reader": TEXT, "dense": TEXT, "prefetch": TEXT, "model": TEXT, "numerics": TEXT,
            "kernels": TEXT, "kv-type": TEXT, "reads_in_flight": NUMBER,
        },
        "token_time": {
            "compute_s": NUMBER, "experts_s": NUMBER, "wait_disk_s": NUMBER,
            "coordination_s": NUMBER, "mean_reads_in_flight": NUMBER,
        },
        "memory": {"total_peak_bytes": NUMBER},
    },
    "before": _STATE, "after": _STATE,
    "machine": {}, "disk": {}, "file_system": {}, "versions": {},
}  # fmt: skip


def wrong_field(record: Mapping[str, Any]) -> str | None:
    """The first field that cannot be what `bench` wrote, in words; None where all can."""
    for name in REQUIRED:
        if record.get(name) is None:
            return f'a "{name}" that is not {_words(SHAPE[name])}'
    found = next(_wrong(record, SHAPE, ""), None)
    if found is None and not 0 <= record["round"] <= MAX_ROUND:
        return f'a "round" that is not between 0 and {MAX_ROUND}'
    run = record.get("run", 0)
    if found is None and (run is None or run < 0):
        return 'a "run" that is not a count'
    return found


def _wrong(found: Mapping[str, Any], shape: Mapping[str, Any], inside: str) -> Iterator[str]:
    for name, kind in shape.items():
        value = found.get(name)
        if value is None:
            continue
        is_object = not isinstance(kind, str)
        if not (isinstance(value, dict) if is_object else KINDS[kind](value)):
            yield f'a "{inside}{name}" that is not {_words(kind)}'
        elif is_object:
            yield from _wrong(value, kind, f"{inside}{name}.")


def _words(kind: Any) -> str:
    return kind if isinstance(kind, str) else "an object"
