"""Programs that are watched: output, time of lines, signals, bytes; groups; the disk below."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_program import wait_until

import coordinator
from coordinator.bench.block import Participant, Place, run_block
from coordinator.bench.cache import cached_bytes, drop_cache
from coordinator.bench.cgroup import (
    LEFTOVER_NANOSECONDS,
    GroupV2,
    group_name,
    open_group,
    remove_leftovers,
)
from coordinator.bench.disk import disk_of, read_ahead
from coordinator.bench.rooms import Room
from coordinator.bench.timings import Timings
from coordinator.command.bench_commands import BenchCommand
from coordinator.command.signals import StopSignals, stop_signals
from coordinator.processes.group import (
    Group,
    Limits,
    ProcessTree,
    bytes_in_io_stat,
    bytes_in_service_bytes,
    number_lines,
)
from coordinator.processes.limits import ResourceError
from coordinator.processes.program import Watched, first_line_of, run_attached, run_watched

MiB = 1 << 20
ROOT = Path(coordinator.__file__).parent.parent
CONTROLLED = os.geteuid() == 0 and os.access("/sys/fs/cgroup/memory/cgroup.procs", os.W_OK)
needs_groups = pytest.mark.skipif(not CONTROLLED, reason="needs root and control groups")


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def is_over(pid: int) -> bool:
    """Whether a process is gone, or dead and not waited for."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    return True


def test_output_and_lines_come_with_their_times() -> None:
    program = (
        "import sys, time; print('out'); print('one', file=sys.stderr, flush=True); "
        "time.sleep(1); sys.stderr.write('two'); sys.exit(3)"
    )
    seen = run_watched(python(program), ProcessTree(), StopSignals(), 30)
    assert (seen.output, seen.exit_code, seen.is_timed_out) == (b"out\n", 3, False)
    (first, one), (second, two) = seen.error_lines
    assert (one, two) == ("one", "two")
    assert seen.started < first < second < seen.ended
    assert 0.2 < second - first < 20


def test_much_output_does_not_block() -> None:
    program = "import sys; print('x' * 3_000_000); print('y' * 3_000_000, file=sys.stderr)"
    seen = run_watched(python(program), ProcessTree(), StopSignals(), 60)
    assert seen.exit_code == 0
    assert len(seen.output) == 3_000_001
    assert [len(line) for _, line in seen.error_lines] == [3_000_000]


def test_page_faults_are_those_of_the_program_and_of_its_children() -> None:
    touch = "memory = bytearray(32 << 20)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {touch!r}])"
    n_pages = (32 << 20) // (2 << 20)  # at least one fault for each huge page
    faults = []
    for program in ("pass", touch, child):
        seen = run_watched(python(program), ProcessTree(), StopSignals(), 30)
        assert seen.major_faults >= 0
        faults.append(seen.minor_faults)
    nothing, own, of_child = faults
    assert own >= nothing + n_pages
    assert of_child >= own


def test_a_program_that_hangs_is_ended() -> None:
    started = time.monotonic()
    seen = run_watched(["sleep", "60"], ProcessTree(), StopSignals(), 0.2)
    assert seen.is_timed_out
    assert seen.exit_code == -signal.SIGTERM
    assert time.monotonic() - started < 10


CLOSED = "import os, time; os.close(1); os.close(2); time.sleep(60)"


def test_a_program_that_says_nothing_more_is_ended_too() -> None:
    """Its pipes are closed, and it runs on."""
    started = time.monotonic()
    seen = run_watched(python(CLOSED), ProcessTree(), StopSignals(), 0.5)
    assert seen.is_timed_out
    stop = StopSignals(signal.SIGINT)
    assert run_watched(python(CLOSED), ProcessTree(), stop, 60).exit_code == -signal.SIGTERM
    assert time.monotonic() - started < 10


def test_a_program_ends_with_whoever_watched_it(tmp_path: Path) -> None:
    """A comparison that was killed is continued, and nothing of it may run beside that."""
    place = tmp_path / "pid"
    child = f"import os, time; open({str(place)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    watcher = f"""
import sys
from coordinator.command.signals import StopSignals
from coordinator.processes.group import ProcessTree
from coordinator.processes.program import run_watched
run_watched([sys.executable, "-S", "-c", {child!r}], ProcessTree(), StopSignals(), 60)
"""
    with subprocess.Popen([sys.executable, "-c", watcher], cwd=ROOT) as process:
        wait_until(lambda: place.exists() and place.read_text() != "")
        process.kill()
    pid = int(place.read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "(zombie)" in state_of(pid), 5)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "(zombie)"


def test_who_outlives_a_program_does_not_hold_it() -> None:
    """A child of it has its pipes, and the program is gone."""
    child = "import time; print('child', flush=True); time.sleep(8)"
    program = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-S", "-c", {child!r}])
print("done", flush=True)
"""
    started = time.monotonic()
    seen = run_watched(python(program), ProcessTree(), StopSignals(), 60)
    assert (seen.exit_code, seen.is_timed_out) == (0, False)
    assert b"done" in seen.output
    assert time.monotonic() - started < 6


def test_a_signal_ends_the_program_and_is_noted() -> None:
    program = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(60)"
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as stop:
        seen = run_watched(python(program), ProcessTree(), stop, 30)
        os.kill(os.getpid(), signal.SIGINT)  # a second one changes nothing
    assert stop.exit_code == 143
    assert seen.exit_code == -signal.SIGTERM
    assert not seen.is_timed_out
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_was_ignored_stays_ignored() -> None:
    """As after nohup: also while something is measured, and for the programs that are."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    program = python(
        "import signal; raise SystemExit(signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)"
    )
    try:
        with stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
            assert run_watched(program, ProcessTree(), stop, 30).exit_code == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_attached_program() -> None:
    with stop_signals(noted=(signal.SIGTERM,)) as stop:
        assert run_attached(python("raise SystemExit(7)"), ProcessTree(), stop) == 7
        ended = python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert run_attached(ended, ProcessTree(), stop) == 128 + signal.SIGKILL
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is None
    with pytest.raises(FileNotFoundError):
        run_attached(["/no/such/program"], ProcessTree(), StopSignals())


def test_bytes_between_two_moments() -> None:
    seen = Watched(read_bytes=[(10.0, 0), (20.0, 100), (30.0, 100), (40.0, 300)])
    assert seen.bytes_between(10, 40) == 300
    assert seen.bytes_between(15, 35) == 150
    assert seen.bytes_between(20, 30) == 0
    assert seen.bytes_between(0, 99) == 300


def test_first_line() -> None:
    assert first_line_of(python("print('a'); print('b')")) == "a"
    assert first_line_of(python("raise SystemExit(1)")) is None
    assert first_line_of(["/no/such/program"]) is None


def test_counters_of_both_versions() -> None:
    old = "254:0 Read 4096\n254:0 Write 8\n7:0 Read 100\nTotal 4204\n"
    new = "254:0 rbytes=4096 wbytes=8 rios=1\n7:0 rbytes=100\n8:0 \n"
    for text, read in ((old, bytes_in_service_bytes), (new, bytes_in_io_stat)):
        assert read(text, "254:0") == 4096
        assert read(text, None) == 4196
        assert read(text, "9:9") == 0
        assert read("", None) == 0
    assert number_lines("max 3\noom_kill 1\nodd\n") == {"max": 3, "oom_kill": 1}


def read_past_the_cache(path: Path) -> list[str]:
    """Read a file from its disk, in a grandchild."""
    return ["sh", "-c", f"dd if={path} of=/dev/null bs=1M iflag=direct 2>/dev/null; true"]


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """8 MiB on a disk."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom(8 * MiB))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    if disk_of(path) is None:
        pytest.skip("no disk under the temporary folder")
    yield path


@needs_groups
def test_a_group_caps_counts_and_goes(data: Path) -> None:
    disk = disk_of(data)
    assert disk is not None
    drop_cache([data], data.parent)  # of this file only: no /proc there
    name = f"moe-coord-test-{os.getpid()}"
    limits = Limits(64 * MiB, 16 * MiB, disk.number)
    group = open_group(name, limits)
    try:
        seen = run_watched(read_past_the_cache(data), group, StopSignals(), 60)
        assert seen.exit_code == 0
        assert group.read_bytes() == seen.read_bytes[-1][1] >= 8 * MiB
        assert seen.ended - seen.started > 0.3  # 8 MiB at 16 MiB/s
        assert group.process_ids() == []
        run_watched(["cat", str(data)], group, StopSignals(), 60)
        assert (group.memory().file_cache_bytes or 0) >= 4 * MiB
        greedy = python("x = bytearray(200 << 20)")
        assert run_watched(greedy, group, StopSignals(), 60).exit_code == -signal.SIGKILL
        memory = group.memory()
        assert memory.peak_bytes is not None and 32 * MiB < memory.peak_bytes <= 64 * MiB
        assert memory.limit_hits and memory.oom_kills == 1
    finally:
        group.close()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{name}"))
    group.close()  # nothing is left to close


@needs_groups
def test_what_is_left_in_a_group_is_killed() -> None:
    group = open_group(f"moe-coord-test-{os.getpid()}", Limits())
    program = ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo started"]
    run_watched(program, group, StopSignals(), 30)
    (left,) = group.process_ids()
    group.close()
    wait_until(lambda: is_over(left))


def test_what_is_done_before_a_block_is_in_its_time(tmp_path: Path) -> None:
    """Here it alone takes more than is left, and the program is not started."""
    place = Place(
        BenchCommand((tmp_path,), keep_cache=True), Room("r"), (), Limits(), 1, {"comparison": "c"}
    )
    mark = tmp_path / "started"

    def command(room: Room, prompt: object, seed: int) -> list[str]:
        time.sleep(0.05)
        return ["touch", str(mark)]

    who = Participant("a", "test", command, lambda seen: Timings(None, ()))
    assert run_block(who, [1], 0, place, StopSignals(), time.monotonic() + 0.02) is None
    assert not mark.exists()
    record = run_block(who, [1], 0, place, StopSignals(), time.monotonic() + 60)
    assert record is not None and mark.exists()


def test_without_a_group_the_bytes_are_those_of_the_tree(data: Path) -> None:
    group = ProcessTree()
    own = python(
        f"import os, mmap, time; fd = os.open({str(data)!r}, os.O_RDONLY | os.O_DIRECT); "
        "os.preadv(fd, [mmap.mmap(-1, 8 << 20)], 0); time.sleep(1)"
    )
    assert run_watched(own, group, StopSignals(), 60).read_bytes[-1][1] >= 8 * MiB


@pytest.mark.parametrize("places", [("",), ("memory", "blkio")])
def test_groups_that_killed_runs_have_left(tmp_path: Path, places: tuple[str, ...]) -> None:
    """Folders that are not empty stand for groups with processes: neither can be removed."""
    now, alive, dead = time.monotonic_ns(), os.getpid(), 999_999_999
    long_ago = now - LEFTOVER_NANOSECONDS - 10**9
    (tmp_path / f"proc/{alive}").mkdir(parents=True)
    kept = [
        f"moe-coord-block-{alive}-{long_ago}", f"moe-coord-block-{dead}-{now}",
        f"moe-coord-capped-{dead}-{long_ago}", "moe-coord-service", f"other-{dead}-{long_ago}",
    ]  # fmt: skip
    gone = [f"moe-coord-block-{dead}-{long_ago}", f"moe-coord-disk-limit-{dead}-{long_ago}"]
    for place in places:
        for name in (*kept, *gone):
            (tmp_path / "sys/fs/cgroup" / place / name).mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup" / place / kept[2] / "busy").touch()
    remove_leftovers(tmp_path)
    for place in places:
        found = [path.name for path in (tmp_path / "sys/fs/cgroup" / place).iterdir()]
        assert sorted(found) == sorted(kept)


def test_no_two_groups_have_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed leaves its groups behind; the next one makes its own beside them."""
    top = UnifiedTree(tmp_path, monkeypatch).top
    for _ in range(2):
        open_group(group_name("disk-limit"), Limits(memory_bytes=1), tmp_path)
    assert len(list(top.glob(f"moe-coord-disk-limit-{os.getpid()}-*"))) == 2


class UnifiedTree:
    """A folder that answers like a mount of cgroup version 2."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = root / "sys/fs/cgroup"
        self.top.mkdir(parents=True)
        (self.top / "cgroup.controllers").write_text("cpu io memory pids\n")
        (self.top / "cgroup.subtree_control").write_text("")
        make_folder, remove_folder = Path.mkdir, Path.rmdir

        def mkdir(path: Path) -> None:  # the kernel fills a new group
            make_folder(path)
            for file in ("memory.max", "memory.swap.max", "io.max", "cgroup.procs"):
                (path / file).write_text("")
            (path / "memory.peak").write_text("5000\n")
            (path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n")
            (path / "memory.stat").write_text("anon 1\ninactive_file 20\nactive_file 3\nshmem 9\n")
            (path / "io.stat").write_text("254:0 rbytes=4096 wbytes=0\n")

        def rmdir(path: Path) -> None:  # and empties it
            for file in path.iterdir():
                file.unlink()
            remove_folder(path)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", rmdir)


def test_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = UnifiedTree(tmp_path, monkeypatch).top
    group: Group = open_group("block", Limits(64 * MiB, 1000, "254:0"), tmp_path)
    assert isinstance(group, GroupV2)
    folder = top / "block"
    assert (folder / "memory.max").read_text() == str(64 * MiB)
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "io.max").read_text() == "254:0 rbps=1000"
    assert (top / "cgroup.subtree_control").read_text() == "+io"  # one controller a write
    assert group.entrances() == [folder / "cgroup.procs"]
    assert group.read_bytes() == 4096
    memory = group.memory()
    assert (memory.peak_bytes, memory.limit_hits, memory.oom_kills) == (5000, 7, 1)
    assert memory.file_cache_bytes == 23
    group.close()
    assert not folder.exists()


def test_no_control_groups(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    with pytest.raises(ResourceError, match="run it as root"):
        open_group("block", Limits(memory_bytes=1), tmp_path)
    (tmp_path / "sys/fs/cgroup/block").mkdir(exist_ok=True)
    assert isinstance(open_group("block", Limits(), tmp_path), ProcessTree)


def disk_tree(root: Path, folder: Path) -> Path:
    """The disk of `folder` as a partition of ``sdx``, under `root`."""
    device = folder.stat().st_dev
    queue = root / "sys/block/sdx/queue"
    queue.mkdir(parents=True)
    (root / "sys/block/sdx/dev").write_text("8:0\n")
    (queue / "read_ahead_kb").write_text("4096\n")
    part = root / "sys/block/sdx/sdx1"
    part.mkdir()
    (part / "partition").write_text("1\n")
    (part / "dev").write_text("8:1\n")
    links = root / "sys/dev/block"
    links.mkdir(parents=True)
    (links / f"{os.major(device)}:{os.minor(device)}").symlink_to(part)
    return queue / "read_ahead_kb"


def test_the_disk_of_a_partition_and_its_read_ahead(tmp_path: Path) -> None:
    file = disk_tree(tmp_path, tmp_path)
    disk = disk_of(tmp_path, tmp_path)
    assert disk is not None
    assert (disk.name, disk.number, disk.read_ahead_kib) == ("sdx", "8:0", 4096)
    with pytest.raises(KeyError), read_ahead(disk, 128):
        assert file.read_text() == "128\n"
        raise KeyError
    assert file.read_text() == "4096\n"
    with read_ahead(disk, None):
        assert file.read_text() == "4096\n"
    with read_ahead(disk, 64), pytest.raises(ResourceError, match="another"), read_ahead(disk, 32):
        pass
    assert file.read_text() == "4096\n"
    assert disk_of(tmp_path, tmp_path / "nowhere") is None
    with pytest.raises(ResourceError, match="--read-ahead"), read_ahead(None, 128):
        pass


def test_the_cache_is_dropped_one_way_or_the_other(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"x" * 10_000)
    assert "POSIX_FADV_DONTNEED" in drop_cache([file], tmp_path)  # no /proc there
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/drop_caches").write_text("")
    assert "drop_caches" in drop_cache([file], tmp_path)
    assert (tmp_path / "proc/sys/vm/drop_caches").read_text() == "3\n"


def test_what_is_cached(data: Path) -> None:
    data.read_bytes()
    assert cached_bytes([data]) == 8 * MiB
    drop_cache([data], data.parent)  # of this file only: no /proc there
    assert cached_bytes([data]) == 0
    with data.open("rb") as file:
        file.read(4096)
    found = cached_bytes([data, data])
    assert found is not None and 4096 <= found // 2 < 8 * MiB


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_file_of_somebody_else_is_not_called_cached() -> None:
    """It was: such a model was copied, and what was measured of the page cache left out."""
    program = (
        "import os, sys; from pathlib import Path; "
        "from coordinator.bench.cache import cached_bytes, drop_files; "
        "os.setuid(65534); path = Path(sys.argv[1]); drop_files([path]); "
        "print(cached_bytes([path]))"
    )
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(8 * MiB))
        file.flush()
        Path(file.name).chmod(0o444)
        command = [sys.executable, "-c", program, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() in ("0", "None"), done.stderr
