"""Block records as a comparison writes them, for tests of what is made of them."""

import random
from collections.abc import Mapping

from coordinator.bench.records import Record

ROOM = "the whole machine"
MiB = 1 << 20


def block(arm: str, n_round: int, rate: float, room: str = ROOM, **more: object) -> Record:
    """One block that went well."""
    seconds = 24 / rate
    return {
        "comparison": "test", "question": "io-process", "round": n_round, "room": room, "arm": arm,
        "kind": "moe-coord", "started_utc": "2026-01-01T00:00:00+00:00", "cache": "dropped",
        "cached_before": 0, "cached_after": 0, "wall_s": seconds + 1, "others_cores": 0.0,
        "exit_code": 0, "tok_s": rate, "prompt_tok_s": 10.0, "measured_tokens": 24,
        "measured_s": seconds, "tokens": [1, 2, n_round], "prompt": [5],
        "spans": [[1, seconds / 24]] * 24,
        "memory": {"peak_bytes": 300 * MiB, "limit_hits": 0, "oom_kills": 0,
                   "file_cache_bytes": 0},
        "bytes": {"per_token": 2_000_000, "measured": 48_000_000},
        "before": {"hottest_c": 50.0, "on_mains": True, "throttle_count": 0},
        "after": {"hottest_c": 50.0, "on_mains": True, "throttle_count": 0},
        "report": {
            "settings": {"reader": "direct", "dense": "anonymous", "prefetch": "off",
                         "reads_in_flight": 4},
            "token_time": {"compute_s": 0.4 / rate, "wait_disk_s": 0.3 / rate,
                           "coordination_s": 0.1 / rate, "mean_reads_in_flight": 1.5},
            "experts": {"requests": 100, "hits": 40},
            "memory": {"total_peak_bytes": 280 * MiB},
            "faults": {"major": 0.0, "minor": 3.0},
        },
        "settings": {"cap_bytes": None, "model_names": ["m"], "expert_bytes": 2 << 30},
        "machine": {"cpu": "c", "cores": 2, "memory_kib": 8 << 20},
        "disk": {"name": "vda", "model": "d"}, "file_system": {"type": "ext4"},
        "versions": {"moe-coord": "0"},
    } | more  # fmt: skip


def blocks(
    speeds: Mapping[str, float], n_rounds: int, seed: int, room: str = ROOM, noise: float = 0.03
) -> list[Record]:
    """Rounds of arms with these speeds; the machine drifts for all, each block has its noise."""
    draw = random.Random(seed)
    records = []
    for n_round in range(n_rounds):
        drift = draw.lognormvariate(0, 0.1)
        for arm, speed in speeds.items():
            records.append(block(arm, n_round, speed * drift * draw.lognormvariate(0, noise), room))
    return records
