"""Small resource limits: one line and exit code 4, or one warning and a run; never a crash."""

import ctypes
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from arms import PROGRAM, TIMEOUT_SECONDS
from gguf_builder import tiny_model
from needs import needs_program

PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
RUN = ("--tokens", "5,6", "-n", "2")
LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "as": resource.RLIMIT_AS,
    "fsize": resource.RLIMIT_FSIZE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", width=128)


def limited(
    model: Path, limit: str, value: int, *flags: str, before: Callable[[], object] = int
) -> tuple[int, list[str]]:
    """Exit code and lines of standard error of a run under a limit that it cannot raise."""

    def set_limit() -> None:
        before()
        resource.setrlimit(LIMITS[limit], (value, value))

    done = subprocess.run(
        [*PROGRAM, "--model", str(model), *RUN, *flags],
        preexec_fn=set_limit,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(("n_files", "flags"), [(16, ()), (24, ()), (16, ("--single-process",))])
def test_too_few_open_files(model: Path, n_files: int, flags: tuple[str, ...]) -> None:
    code, lines = limited(model, "nofile", n_files, *flags)
    assert code == 4
    assert [line for line in lines if "error" in line] == lines[-1:]
    assert lines[-1].startswith("moe-coord: error: open files: expected a limit of at least")
    assert str(n_files) in lines[-1]


@pytest.mark.alone
@pytest.mark.parametrize("flags", [(), ("--io-workers", "3"), ("--single-process",)])
def test_too_few_processes(flags: tuple[str, ...]) -> None:
    """The limit counts all threads of a user. Seen before anything is started, in one line; as many
    as it asks for are enough."""
    needed = int(with_processes(3, *flags)[1].partition("at least ")[2].split()[0])
    for limit, code in ((needed - 3, 4), (needed + 8, 0)):
        found, line = with_processes(limit, *flags)
        assert found == code, line
        if code:
            assert line.startswith("moe-coord: error: processes: expected a limit of at least")
            assert f"found {limit}; raise it" in line


def with_processes(limit: int, *flags: str) -> tuple[int, str]:
    """Exit code and last line of a run of a user who may have so many threads.

    Root may have any number: it becomes somebody else, who may read what root may.
    """
    command = [*PROGRAM, *RUN, *flags]
    if os.geteuid() == 0:
        setpriv = needs_program("setpriv", package="util-linux")
        right = "+dac_override"
        command = [
            setpriv, "--reuid=64123", "--regid=64123", "--clear-groups",
            f"--inh-caps={right}", f"--ambient-caps={right}", *command,
        ]  # fmt: skip
    done = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.stderr.startswith("setpriv:"):
        pytest.skip("this root cannot become another user")
    return done.returncode, done.stderr.splitlines()[-1]


def test_as_many_open_files_as_it_asks_for(model: Path) -> None:
    """The figures are enough, and a soft limit below the hard one is raised."""
    _, lines = limited(model, "nofile", 16, "--io-workers", "4")
    needed = int(lines[-1].partition("at least ")[2].split()[0])
    code, lines = limited(model, "nofile", needed, "--io-workers", "4")
    assert code == 0, lines
    done = subprocess.run(
        ["sh", "-c", 'ulimit -Sn 16 && exec "$@"', "sh", *PROGRAM, "--model", str(model), *RUN],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_pool_is_larger_than_a_file_may_be(model: Path) -> None:
    code, lines = limited(model, "fsize", 65536)
    assert code == 4
    assert lines[-1].startswith("moe-coord: error: pool: cannot allocate")
    assert "ulimit -f" in lines[-1]


def test_too_little_address_space_ends_soon(model: Path) -> None:
    """So little that a child may not even import its modules: it must not hang, whatever fails."""
    code, lines = limited(model, "as", 100 << 20)
    assert code in (4, 5), lines
    assert lines[-1].startswith("moe-coord: error: ")


def drop_lock_capability() -> None:
    """Root may lock without limit: take that away (others may not anyway)."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)


def can_drop() -> bool:
    """Whether this user has no right to lock, or can give it up in a child."""
    if os.geteuid() != 0:
        return True
    program = f"import ctypes; print(ctypes.CDLL(None).prctl({PR_CAPBSET_DROP}, {CAP_IPC_LOCK}))"
    done = subprocess.run([PROGRAM[0], "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "0"


@pytest.mark.parametrize("value", [0, 65536])
def test_memory_that_may_not_be_locked(model: Path, value: int) -> None:
    if not can_drop():
        pytest.skip("this root cannot give up CAP_IPC_LOCK (no CAP_SETPCAP)")
    code, lines = limited(model, "memlock", value, before=drop_lock_capability)
    assert code == 0, lines
    (warning,) = [line for line in lines if "mlock" in line]
    assert warning.startswith("warning: compute: mlock: cannot lock")
    assert f"the limit is {value} bytes" in warning
    assert "ulimit -l" in warning
    for flags in ((), ("--single-process",)):
        code, lines = limited(
            model, "memlock", value, "--mlock", "require", *flags, before=drop_lock_capability
        )
        assert code == 4
        assert [line for line in lines if "mlock" in line] == lines[-1:]
        assert lines[-1].startswith("moe-coord: error: ")


def test_memory_that_need_not_be_locked(model: Path) -> None:
    code, lines = limited(model, "memlock", 0, "--mlock", "off", before=drop_lock_capability)
    assert code == 0, lines
    assert not [line for line in lines if "mlock" in line]
