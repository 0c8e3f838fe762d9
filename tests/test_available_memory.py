from pathlib import Path

import pytest

from coordinator.processes.available_memory import available_memory

MiB = 1 << 20
MEMINFO = {"proc/meminfo": "MemTotal:  24683520 kB\nMemAvailable:   8388608 kB\n"}
V1 = {"proc/self/cgroup": "7:blkio:/\n4:memory:/outer/inner\n1:cpu:/\n"}
V2 = {"proc/self/cgroup": "0::/outer/inner\n"}
V1_INNER, V1_OUTER = "sys/fs/cgroup/memory/outer/inner/", "sys/fs/cgroup/memory/outer/"
V2_INNER, V2_ROOT = "sys/fs/cgroup/outer/inner/", "sys/fs/cgroup/"
UNLIMITED_V1 = "9223372036854771712\n"


def v1(folder: str, limit: str | int, usage: int, stat: str = "") -> dict[str, str]:
    return {
        folder + "memory.limit_in_bytes": f"{limit}\n",
        folder + "memory.usage_in_bytes": f"{usage}\n",
        folder + "memory.stat": stat,
    }


def v2(folder: str, limit: str | int, usage: int, stat: str = "") -> dict[str, str]:
    return {
        folder + "memory.max": f"{limit}\n",
        folder + "memory.current": f"{usage}\n",
        folder + "memory.stat": stat,
    }


CASES = [
    ("no cgroup at all", MEMINFO, 8192 * MiB, "MemAvailable"),
    ("v1 without a limit", MEMINFO | V1 | v1(V1_INNER, UNLIMITED_V1, 5), 8192 * MiB, "MemAvail"),
    ("v2 without a limit", MEMINFO | V2 | v2(V2_INNER, "max", 5), 8192 * MiB, "MemAvailable"),
    (
        "the host's 8 GiB do not count inside 120 MiB",
        MEMINFO | V1 | v1(V1_INNER, 120 * MiB, 20 * MiB),
        100 * MiB,
        "/sys/fs/cgroup/memory/outer/inner/memory.limit_in_bytes",
    ),
    (
        "a limit further up counts",
        MEMINFO | V1 | v1(V1_INNER, UNLIMITED_V1, 0) | v1(V1_OUTER, 300 * MiB, 100 * MiB),
        200 * MiB,
        "/sys/fs/cgroup/memory/outer/memory.limit_in_bytes",
    ),
    (
        "the smallest room, not the smallest limit",
        MEMINFO | V1 | v1(V1_INNER, 200 * MiB, 0) | v1(V1_OUTER, 300 * MiB, 250 * MiB),
        50 * MiB,
        "/sys/fs/cgroup/memory/outer/memory.limit_in_bytes",
    ),
    (
        "v2",
        MEMINFO | V2 | v2(V2_INNER, 500 * MiB, 100 * MiB),
        400 * MiB,
        "/sys/fs/cgroup/outer/inner/memory.max",
    ),
    (
        "v2 is throttled above memory.high, which is as bad",
        MEMINFO | V2 | v2(V2_INNER, "max", 100 * MiB)
        | {V2_INNER + "memory.high": f"{300 * MiB}\n"},
        200 * MiB,
        "/sys/fs/cgroup/outer/inner/memory.high",
    ),
    (
        "a container sees the host's path and its own group at the root of the mount",
        MEMINFO | V2 | v2(V2_ROOT, 500 * MiB, 100 * MiB),
        400 * MiB,
        "/sys/fs/cgroup/memory.max",
    ),
    (
        "page cache of the group can be taken back",
        MEMINFO | V1 | v1(V1_INNER, 500 * MiB, 480 * MiB,
                          f"inactive_file 1\ntotal_inactive_file {300 * MiB}\n"
                          f"total_active_file {100 * MiB}\ntotal_rss 7\n"),
        420 * MiB,
        "/sys/fs/cgroup/memory/outer/inner/memory.limit_in_bytes",
    ),
    (
        "the same in v2",
        MEMINFO | V2 | v2(V2_INNER, 500 * MiB, 480 * MiB,
                          f"anon 5\ninactive_file {300 * MiB}\nactive_file {100 * MiB}\n"),
        420 * MiB,
        "/sys/fs/cgroup/outer/inner/memory.max",
    ),
    (
        "usage above the limit is no room, not a negative one",
        MEMINFO | V2 | v2(V2_INNER, 100 * MiB, 150 * MiB),
        0,
        "/sys/fs/cgroup/outer/inner/memory.max",
    ),
    (
        "the host is smaller than the limit",
        MEMINFO | V2 | v2(V2_INNER, 16384 * MiB, 0),
        8192 * MiB,
        "MemAvailable in /proc/meminfo",
    ),
    ("files that say nonsense", MEMINFO | V2 | v2(V2_INNER, "lots", 0), 8192 * MiB, "MemAvail"),
    ("a path that climbs", MEMINFO | {"proc/self/cgroup": "0::/../x\n"}, 8192 * MiB, "MemAvail"),
    ("nothing to read", {}, 0, "no /proc/meminfo"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "n_bytes", "source"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_smallest_room_counts(
    tmp_path: Path, files: dict[str, str], n_bytes: int, source: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = available_memory(tmp_path)
    assert (found.n_bytes, source in found.source) == (n_bytes, True), found


@pytest.mark.parametrize(
    ("n_bytes", "reserve"), [(0, 256 * MiB), (1000 * MiB, 256 * MiB), (8000 * MiB, 640 * MiB)]
)
def test_the_reserve_is_eight_percent_or_256_mebibytes(
    tmp_path: Path, n_bytes: int, reserve: int
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {n_bytes // 1024} kB\n")
    assert available_memory(tmp_path).reserve_bytes == reserve


def test_this_machine_has_some() -> None:
    assert available_memory().n_bytes > 0
