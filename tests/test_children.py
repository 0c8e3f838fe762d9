"""Children that do not behave, as real processes: each is recognised, told, and leaves nothing."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import open_descriptors
from running_program import socket_directories

from coordinator.processes.children import (
    STOP_TIMEOUT_SECONDS,
    Arrived,
    Children,
    Died,
    Misbehaved,
    News,
)
from coordinator.processes.launch import ChildSpec
from shm.messages import Progress, Ready
from shm.pool import PoolLayout, SlotClass, create_pool

LAYOUT = PoolLayout((SlotClass(2, (4096, 4096, 4096)),))
WAIT_SECONDS = 20.0


@pytest.fixture(autouse=True)
def rogues_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(Path(__file__).parent)]))


@pytest.fixture
def children() -> Iterator[Children]:
    gc.collect()  # what earlier tests left is not closed in between
    before = open_descriptors()
    with Children() as found:
        yield found
    assert list(found) == []
    assert socket_directories(os.getpid()) == []
    assert open_descriptors() == before


@pytest.fixture
def pool_fd() -> Iterator[int]:
    fd = create_pool(LAYOUT)
    yield fd
    os.close(fd)


def spec(name: str, pool_fd: int, module: str = "rogue_child") -> ChildSpec:
    return ChildSpec(name, module, (), pool_fd, LAYOUT, (), (), b"settings")


def news_until(children: Children, *kinds: type) -> list[News]:
    """Everything that happens until one of these kinds."""
    found: list[News] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while not any(isinstance(news, kinds) for news in found):
        assert time.monotonic() < deadline, found
        found += children.wait(0.1)
    return found


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rubbish", "sent rubbish (message: not valid msgpack"),
        ("ready before hello", "sent Ready before Hello"),
        ("ready with rubbish", "sent rubbish (message: expected a Ready with JSON"),
        ("other protocol", "is not the process that was started"),
        ("other name", "is not the process that was started"),
        ("other pid", "is not the process that was started"),
        ("other token", "is not the process that was started"),
    ],
)
def test_who_is_not_ours_is_recognised_and_killed(
    children: Children, pool_fd: int, name: str, why: str
) -> None:
    child = children.start(spec(name, pool_fd), 0)
    (news,) = news_until(children, Misbehaved)
    assert isinstance(news, Misbehaved)
    assert news.child is child
    assert news.why.startswith(why)
    children.kill(child, news.why)
    (death,) = news_until(children, Died)
    assert isinstance(death, Died)
    assert (death.code, death.why) == (-signal.SIGKILL, news.why)
    assert children.get(name) is None
    children.kill(child, "again")  # no harm: it is gone


def test_the_last_words_of_the_dead_are_heard(children: Children, pool_fd: int) -> None:
    children.start(spec("last words", pool_fd), 0)
    (death,) = news_until(children, Died)
    assert isinstance(death, Died)
    assert death.code == 4
    assert death.child.failure == (4, "no memory for that")
    assert death.why == "no memory for that"


@pytest.mark.parametrize(
    ("name", "module", "code"),
    [("dies without a word", "rogue_child", 7), ("x", "no_such_module", 1)],
)
def test_a_death_without_a_word(
    children: Children, pool_fd: int, name: str, module: str, code: int
) -> None:
    started = time.monotonic()
    children.start(spec(name, pool_fd, module), 0)
    (death,) = news_until(children, Died)
    assert isinstance(death, Died)
    assert (death.code, death.why) == (code, f"exit {code}")
    assert time.monotonic() - started < 30  # far less than a start may take


@pytest.mark.parametrize("name", ["hello twice", "finishes others"])
def test_what_is_no_business_of_a_child_reaches_the_engine(
    children: Children, pool_fd: int, name: str
) -> None:
    """Which condemns whoever sends what it does not expect."""
    children.start(spec(name, pool_fd), 0)
    news = news_until(children, Arrived)
    assert not isinstance(news[0], Misbehaved)


def test_after_hello_nothing_is_on_the_disk(children: Children, pool_fd: int) -> None:
    children.start(spec("stuck", pool_fd), 0)
    assert len(socket_directories(os.getpid())) == 1
    (directory,) = socket_directories(os.getpid())
    assert directory.stat().st_mode & 0o777 == 0o700
    (news,) = news_until(children, Arrived)
    assert isinstance(news, Arrived)
    assert news.message == Progress("dense", 1, 3)
    assert socket_directories(os.getpid()) == []


def test_one_that_starts_is_not_waited_for_at_the_end(children: Children, pool_fd: int) -> None:
    children.start(spec("stuck", pool_fd), 0)
    news_until(children, Arrived)
    started = time.monotonic()
    children.stop_all()
    assert time.monotonic() - started < STOP_TIMEOUT_SECONDS - 1


def test_one_that_is_ready_ends_when_it_is_asked(children: Children, pool_fd: int) -> None:
    child = children.start(spec("behaves", pool_fd), 0)
    (news,) = news_until(children, Arrived)
    assert isinstance(news, Arrived)
    assert news.message == Ready("behaves", "{}")
    child.is_ready = True
    children.stop_all()
    assert child.reap() == 0


def test_a_flood_does_not_keep_the_others_from_their_turn(children: Children, pool_fd: int) -> None:
    children.start(spec("floods", pool_fd), 0)
    children.start(spec("behaves", pool_fd), 0)
    names = set()
    while len(names) < 2:
        names |= {news.child.name for news in news_until(children, Arrived)}
    flooding = children.get("floods")
    assert flooding is not None
    while flooding.n_done < 4999:
        children.wait(0.1)


def test_children_start_from_the_main_thread_only(children: Children, pool_fd: int) -> None:
    """The kernel would kill them when that thread ends."""
    caught: list[BaseException] = []

    def start() -> None:
        try:
            children.start(spec("behaves", pool_fd), 0)
        except AssertionError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_a_program_that_cannot_be_started_leaves_nothing(
    children: Children, pool_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(FileNotFoundError):
        children.start(spec("behaves", pool_fd), 0)
    assert socket_directories(os.getpid()) == []
