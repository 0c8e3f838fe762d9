"""How many threads a user may have: what runs is counted, what comes is known before."""

import os
import resource
from pathlib import Path

import pytest

from coordinator.processes.limits import ResourceError, check_threads, running_threads

USER = os.getuid()


def process(root: Path, pid: str, user: int, n_threads: int, capabilities: int = 0) -> None:
    """A process as /proc shows it."""
    folder = root / "proc" / pid
    folder.mkdir(parents=True)
    ids = f"{user}\t{user + 1}\t{user}\t{user}"
    text = f"Name:\tx\nUid:\t{ids}\nThreads:\t{n_threads}\nCapEff:\t{capabilities:016x}\n"
    (folder / "status").write_text(text)


def machine(root: Path, capabilities: int = 0) -> Path:
    """Two processes of this user with 5 threads, one of another, and one that is gone."""
    process(root, "12", USER, 2)
    process(root, "13", USER, 3)
    process(root, "14", USER + 5, 100)
    process(root, "self", USER, 3, capabilities)
    (root / "proc" / "99").mkdir()
    return root


def test_threads_of_a_user_are_counted(tmp_path: Path) -> None:
    assert running_threads(USER, machine(tmp_path)) == 5
    assert running_threads(USER + 1, tmp_path) == 0
    assert running_threads(USER, Path("/")) >= 1


@pytest.mark.parametrize(
    ("capabilities", "may_be_few"), [(0, False), (1 << 21, True), (1 << 24, True)]
)
def test_too_few_are_refused_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: int, may_be_few: bool
) -> None:
    """3 processes of 3 threads, 7 more, 4 of metrics: 20 beside the 5 that run."""
    root = machine(tmp_path, capabilities)
    monkeypatch.setattr(os, "getuid", lambda: USER or 1000)
    if USER == 0:
        for folder in root.joinpath("proc").glob("1*"):
            text = (folder / "status").read_text()
            (folder / "status").write_text(text.replace("Uid:\t0", "Uid:\t1000"))
    limit = (24, 100)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limit)
    if may_be_few:
        check_threads(2, 7, root)
        return
    with pytest.raises(ResourceError) as caught:
        check_threads(2, 7, root)
    for part in ("at least 25", "ulimit -u", "5 threads of this user run, 20 come", "found 24"):
        assert part in str(caught.value)
    limit = (25, 100)
    check_threads(2, 7, root)
