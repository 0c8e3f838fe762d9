"""What every block line says beside its measurement: settings, versions, machine, disk."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from coordinator.bench.disk import Disk, file_system
from coordinator.bench.machine import describe_machine, versions
from coordinator.bench.models import Measured
from coordinator.bench.participants import Who
from coordinator.bench.questions import pair_record
from coordinator.bench.records import Record
from coordinator.command.bench_commands import BenchCommand


def comparison_of(bench: BenchCommand, who: Who, models: Sequence[Measured]) -> str:
    """A short name of what is compared: runs with the same one may be continued.

    It covers what changes a block, not how many of them are run.
    """
    what: dict[str, Any] = {
        "question": bench.question,
        "models": [[model.path.name, model.fingerprint] for model in models],
        "arms": [[arm.name, _without_folders(arm.flags)] for arm in who.arms],
        "peers": [[peer.name, peer.command] for peer in bench.peers],
        "rooms": [[room.name, room.flags, room.cap_bytes] for room in who.rooms],
        "disk_rate": bench.disk_bytes_per_second,
        "read_ahead": bench.read_ahead_kib,
        "keep_cache": bench.keep_cache,
        "nice": bench.niceness,
        "tokens": [bench.n_tokens, bench.n_warm_up, bench.n_prompt, bench.seed],
        "threads": who.n_threads,
    }
    text = json.dumps(what, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def common_of(
    bench: BenchCommand,
    who: Who,
    models: Sequence[Measured],
    disk: Disk | None,
    comparison: str,
) -> Record:
    """The part of a line that all blocks of a comparison share."""
    return {
        "comparison": comparison,
        "question": who.sweep.question,
        "pairs": [pair_record(pair) for pair in who.sweep.pairs],
        "settings": {
            "models": [str(model.path) for model in models],
            "model_names": [model.name for model in models],
            "fingerprints": [model.fingerprint for model in models],
            "expert_bytes": models[0].expert_bytes,
            "copied": bool(who.copies),
            "disk_bytes_per_second": bench.disk_bytes_per_second,
            "read_ahead_kib": bench.read_ahead_kib,
            "read_ahead_kib_before": disk.read_ahead_kib if disk is not None else None,
            "nice": bench.niceness,
            "keep_cache": bench.keep_cache,
            "tokens": bench.n_tokens,
            "warm_up": bench.n_warm_up,
            "prompt_tokens": bench.n_prompt,
            "seed": bench.seed,
            "compute_threads": who.n_threads,
        },
        "machine": describe_machine(),
        "disk": disk.describe() if disk is not None else None,
        "file_system": file_system(who.copies.get(bench.model, bench.model)),
        "versions": versions(),
    }


def _without_folders(flags: Sequence[str]) -> list[str]:
    """A copy of a model lies elsewhere each time."""
    return [
        flag.rpartition("/")[2] if before in ("-m", "--model") else flag
        for before, flag in zip(("", *flags), flags, strict=False)
    ]
