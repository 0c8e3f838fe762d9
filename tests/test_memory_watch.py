"""What is heard of memory while a run goes on: who took it, and who gave it back."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pressed_run import Machine, MiB

from coordinator.processes.accounting import private_bytes
from coordinator.processes.memory_watch import MemoryWatch
from shm.pool import PoolLayout, SlotClass, create_pool

LAYOUT = PoolLayout((SlotClass(64, (4096, 4096, 4096)),))
CHILD_MIB = 64
HOLDS_MEMORY = f"held = b'x' * ({CHILD_MIB} << 20); print('held', flush=True); input()"


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of the run that holds `CHILD_MIB`."""
    command = [sys.executable, "-I", "-c", HOLDS_MEMORY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"held\n"
        yield started
        started.kill()


@pytest.fixture
def pool_fd() -> Iterator[int]:
    fd = create_pool(LAYOUT)
    yield fd
    os.close(fd)


def test_what_a_child_leaves_behind_is_not_taken_by_others(
    tmp_path: Path, pool_fd: int, child: "subprocess.Popen[bytes]"
) -> None:
    """Its death makes room before its memory is no longer counted as ours."""
    machine = Machine(tmp_path)
    machine.leave(100 * MiB)
    watch = MemoryWatch(pool_fd, LAYOUT, 0, tmp_path)
    watch.begin([child.pid], 0.0)
    assert watch.accounted_bytes > CHILD_MIB * MiB
    assert watch.look([child.pid], 0.0) is None
    left_bytes = private_bytes(child.pid)
    child.kill()
    child.wait()
    machine.leave(100 * MiB + left_bytes)
    assert watch.look([], 1.0) is None
    watch.account([], 1.12)
    assert watch.look([], 1.12) is None
    machine.leave(100 * MiB)
    assert watch.look([], 1.24) is not None, "this time it was somebody else"
