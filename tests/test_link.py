import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shm.birth import start_time
from shm.codec import MAX_MESSAGE_BYTES
from shm.link import (
    MAX_PATH_BYTES,
    LinkError,
    endpoint_in,
    make_socket_directory,
    pair_socket,
    remove_left_directories,
    remove_socket_directory,
)

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as made:
        yield made


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a short name: socket paths are limited."""
    folder = Path(tempfile.mkdtemp(prefix="link-", dir="/tmp"))
    yield folder
    for left in folder.iterdir():
        remove_socket_directory(left)
    folder.rmdir()


def test_both_ends_talk_after_the_socket_file_is_gone(context: Context, short_path: Path) -> None:
    directory = make_socket_directory([short_path])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with (
        pair_socket(context, endpoint_in(directory), bind=True) as parent,
        pair_socket(context, endpoint_in(directory), bind=False) as child,
    ):
        child.send(b"hello")
        assert parent.recv() == b"hello"
        remove_socket_directory(directory)
        remove_socket_directory(directory)  # twice is no error
        assert not directory.exists()
        for _ in range(3):
            parent.send(b"to the child")
            assert child.recv() == b"to the child"
            child.send(b"to the parent")
            assert parent.recv() == b"to the parent"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("is_bound", [True, False])
def test_exit_does_not_wait_for_messages_nobody_takes(short_path: Path, is_bound: bool) -> None:
    directory = make_socket_directory([short_path])
    ours, theirs = zmq.Context(), zmq.Context()
    # the one that binds comes first
    ends = [
        pair_socket(ours if is_bound == binds else theirs, endpoint_in(directory), bind=binds)
        for binds in (True, False)
    ]
    sender, silent = ends if is_bound else reversed(ends)
    assert sender.poll(5000, zmq.POLLOUT)
    while sender.poll(300, zmq.POLLOUT):  # until it is full: the peer lives and takes nothing
        sender.send(b"x" * 10_000, zmq.DONTWAIT)
    before = time.monotonic()
    sender.close()
    ours.term()
    assert time.monotonic() - before < 10
    silent.close(linger=0)
    theirs.term()


@pytest.mark.parametrize("binds", [True, False])
def test_without_a_peer_a_send_fails_and_is_not_queued(
    context: Context, short_path: Path, binds: bool
) -> None:
    directory = make_socket_directory([short_path])
    with (
        pair_socket(context, endpoint_in(directory), bind=binds) as socket,
        pytest.raises(zmq.Again),
    ):
        socket.send(b"x", zmq.DONTWAIT)


def test_a_message_over_the_limit_is_not_taken(context: Context, short_path: Path) -> None:
    directory = make_socket_directory([short_path])
    with (
        pair_socket(context, endpoint_in(directory), bind=True) as parent,
        pair_socket(context, endpoint_in(directory), bind=False) as child,
    ):
        child.send(b"x" * MAX_MESSAGE_BYTES)
        assert len(parent.recv()) == MAX_MESSAGE_BYTES
        child.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        assert not parent.poll(300)


def test_a_directory_lands_in_the_first_place_that_takes_it(short_path: Path) -> None:
    missing, file = short_path / "missing", short_path / "file"
    file.touch()
    good = short_path / "good"
    good.mkdir()
    directory = make_socket_directory([missing, file, good])
    assert directory.parent == good
    pid = os.getpid()
    assert directory.name.startswith(f"moe-coord-{pid}-{start_time(pid)}-")
    remove_socket_directory(directory)
    file.unlink()
    with pytest.raises(LinkError, match=r"missing \(No such file or directory\)"):
        make_socket_directory([missing])


def test_a_path_that_is_too_long_is_refused_with_the_limit(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with pytest.raises(LinkError, match=f"at most {MAX_PATH_BYTES}"):
        make_socket_directory([deep])
    assert list(deep.iterdir()) == []


def test_bind_where_there_is_no_directory_is_refused(context: Context, short_path: Path) -> None:
    with pytest.raises(LinkError, match="cannot bind"):
        pair_socket(context, endpoint_in(short_path / "missing"), bind=True)


def test_only_what_a_killed_start_left_is_removed(short_path: Path) -> None:
    dead = subprocess.Popen(["sleep", "0"])
    dead.wait()
    gone, living = f"moe-coord-{dead.pid}", f"moe-coord-{os.getpid()}"
    mine = f"{living}-{start_time(os.getpid())}"
    left = [f"{gone}-1", f"{gone}-77-abc_1", f"{living}-1-x"]
    kept = [mine, f"{mine}-abc", "moe-coord-x-1", "moe-coord-1", "other", f"x-{gone}-1"]
    for name in left + kept:
        (short_path / name).mkdir(mode=0o700)
        (short_path / name / "link").touch()
    if os.getuid() == 0:  # only root can make a directory that is another user's
        (short_path / f"{gone}-5").mkdir()
        os.chown(short_path / f"{gone}-5", 65534, 65534)
        kept.append(f"{gone}-5")
    (short_path / f"{gone}-2").touch()  # a file, not a directory
    (short_path / f"{gone}-3").symlink_to(short_path / "other")
    full = short_path / f"{gone}-4"
    full.mkdir()
    (full / "not ours").touch()
    removed = remove_left_directories([short_path / "missing", short_path])
    assert {path.name for path in removed} == set(left)
    assert (full / "not ours").exists() and (short_path / "other" / "link").exists()
    assert {path.name for path in short_path.iterdir()} == {
        *kept,
        *[f"{gone}-{number}" for number in (2, 3, 4)],
    }
    (full / "not ours").unlink()
    for number in (2, 3):
        (short_path / f"{gone}-{number}").unlink()
