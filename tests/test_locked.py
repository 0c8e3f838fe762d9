"""Memory that may be locked, in part or not at all."""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from read_cases import pool_of

from compute_worker.locked import lock, lock_as_wanted
from shm.pool import allocated_bytes, punch_hole

PAGES = 8192


def test_what_is_locked_within_the_limit() -> None:
    filled, pool = np.ones(PAGES, np.uint8), np.ones(2 * PAGES, np.uint8)
    outcome = lock(filled, pool)
    assert outcome.needed_bytes == 3 * PAGES
    assert outcome.locked_bytes == (0 if outcome.refusal else 3 * PAGES)
    assert lock(np.ones(0, np.uint8)).refusal == ""
    off = lock_as_wanted("off", filled, pool)
    assert (off.locked_bytes, off.refusal, off.setting) == (0, "", "off")


def test_the_lock_of_a_pool_takes_no_memory() -> None:
    with pool_of(6, 1 << 20, 1 << 20, 1 << 20) as (mapping, fd):
        punch_hole(fd, 1 << 20, 8 << 20)
        held_bytes = allocated_bytes(fd)
        lock(np.ones(PAGES, np.uint8), np.frombuffer(mapping.view, np.uint8))
        assert allocated_bytes(fd) == held_bytes


LOCK_WITHOUT_RIGHTS = """
import os, resource, sys
import numpy as np
from compute_worker.locked import LockRefused, lock, lock_as_wanted
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
memories = np.ones(1 << 15, np.uint8), np.ones(1 << 20, np.uint8)
outcome = lock(*memories)
print(outcome.locked_bytes, outcome.setting, outcome.refusal)
assert lock_as_wanted("auto", *memories) == outcome
try:
    lock_as_wanted("require", *memories)
except LockRefused as error:
    assert str(error) == outcome.refusal
else:
    raise AssertionError("it was not refused")
"""


@pytest.mark.parametrize(
    ("limit", "locked_bytes", "setting", "name"),
    [(0, 0, "off", "EPERM"), (4096, 0, "off", "ENOMEM"), (65536, 1 << 15, "part", "ENOMEM")],
)
def test_a_refused_lock_says_what_is_needed(
    limit: int, locked_bytes: int, setting: str, name: str
) -> None:
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard != resource.RLIM_INFINITY and limit > hard:
        pytest.skip("the hard limit is smaller than the case")
    child = subprocess.run(
        [sys.executable, "-c", LOCK_WITHOUT_RIGHTS, str(limit)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    found, found_setting, refusal = child.stdout.strip().split(" ", 2)
    assert (int(found), found_setting) == (locked_bytes, setting)
    needed = (1 << 15) + (1 << 20)
    assert refusal.startswith(f"mlock: cannot lock {needed} bytes ({name})")
    assert f"the limit is {limit} bytes, {needed - limit} too few" in refusal
