import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shm
from shm.birth import ChildArguments, decode_arguments, encode_arguments, start_time
from shm.codec import MessageError
from shm.pool import PoolLayout, SlotClass

ARGUMENTS = ChildArguments(
    process="io0",
    endpoint="ipc:///run/user/1000/moe-coord-1-2-x/link",
    token="tok",
    parent_pid=os.getpid(),
    cores=(),
    pool_fd=7,
    layout=PoolLayout((SlotClass(3, (8192, 8192, 12288)), SlotClass(1, (8192, 8192, 4096)))),
    file_fds=(5, 6),
)


@pytest.mark.parametrize("pool_fd", [None, 0, 9])
@pytest.mark.parametrize("cores", [(), (0,), (1, 3)])
def test_arguments_travel_as_one_word(pool_fd: int | None, cores: tuple[int, ...]) -> None:
    arguments = ChildArguments("io0", "e", "t", 1, cores, pool_fd, ARGUMENTS.layout, ())
    text = encode_arguments(arguments)
    assert text.isascii() and not text.startswith("-") and " " not in text
    assert decode_arguments(text) == arguments


@given(st.one_of(st.text(), st.binary().map(lambda data: data.hex())))
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(MessageError):
        decode_arguments(text)


def test_damaged_arguments_are_refused() -> None:
    text = encode_arguments(ARGUMENTS)
    for n in range(0, len(text), 4):
        with pytest.raises(MessageError):
            decode_arguments(text[:n])


def test_start_time_names_a_process() -> None:
    mine = start_time(os.getpid())
    assert mine is not None and mine == start_time(os.getpid())
    child = subprocess.Popen(["sleep", "60"])
    try:
        theirs = start_time(child.pid)
        assert theirs is not None and theirs >= mine
    finally:
        child.kill()
        child.wait()
    assert start_time(child.pid) is None
    assert start_time(2**40) is None


def test_start_time_with_a_name_full_of_parentheses(tmp_path: Path) -> None:
    program = tmp_path / ") ( 1 2 3 )"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    try:
        assert start_time(child.pid) is not None
    finally:
        child.kill()
        child.wait()


CHILD = """
import os, signal, sys
from shm.birth import begin_life, decode_arguments
birth = begin_life(decode_arguments(sys.argv[1]))
import ctypes
death_signal = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death_signal), 0, 0, 0)  # PR_GET_PDEATHSIG
print(list(birth.cores), len(birth.warnings), death_signal.value)
print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)
print(signal.getsignal(signal.SIGTERM) == signal.SIG_IGN)
print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def born(arguments: ChildArguments) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-c", CHILD, encode_arguments(arguments)],
        env={**os.environ, "PYTHONPATH": str(Path(shm.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )


def test_what_a_child_does_first() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    first = allowed[0]
    cases: list[tuple[tuple[int, ...], list[int], int]] = [
        ((), allowed, 0),
        ((first,), [first], 0),
        ((first, 4000), [first], 1),  # the kernel drops what does not exist and says nothing
        ((4000,), allowed, 1),
        ((2**31,), allowed, 1),
    ]
    for cores, expected, n_warnings in cases:
        arguments = ChildArguments("x", "e", "t", os.getpid(), cores, None, ARGUMENTS.layout, ())
        lines = born(arguments).stdout.splitlines()
        assert lines == [f"{expected} {n_warnings} 9", "True", "True", "False"], cores


def test_a_child_whose_parent_is_gone_ends_at_once() -> None:
    arguments = ChildArguments("x", "e", "t", 1, (), None, ARGUMENTS.layout, ())
    assert born(arguments).stdout == ""
