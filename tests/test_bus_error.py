import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, os, sys, threading
from coordinator.processes.bus_error import end_on_bus_error
from shm.mapped_files import MappedFiles

path, how = sys.argv[1:]
fd = os.open(path, os.O_RDWR)
mapped = MappedFiles([fd], [40960])
end_on_bus_error("moe-coord: error: gone", 3)
os.truncate(fd, 4096)
copy = ctypes.create_string_buffer(9)
touch = {
    "with the lock": lambda: mapped.touch(0, 40960),
    "without the lock": lambda: ctypes.memmove(copy, mapped.address + 8192, 9),
}[how.removesuffix(" in a thread")]
if how.endswith("thread"):
    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
touch()
"""


@pytest.mark.parametrize(
    "how",
    [
        "with the lock",
        "without the lock",
        "with the lock in a thread",
        "without the lock in a thread",
    ],
)
def test_a_page_that_is_not_there_is_one_line_and_a_code(tmp_path: Path, how: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(40960))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), how],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == "moe-coord: error: gone\n"
    assert done.returncode == 3
