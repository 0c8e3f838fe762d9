"""Limits of this process (`ulimit`) that a run needs, seen to before anything is started.

ZeroMQ ends the whole process when it meets the limit of open files: it must not come to that.
`ResourceError` is raised by all who find less of something than was asked for.
"""

import os
import resource
from pathlib import Path

# standard streams, the pool twice, ZeroMQ's own (3 eventfds, 2 epoll), a file of /proc; measured 22
FILES_OF_THE_PROCESS = 28
FILES_PER_CHILD = 6  # pidfd, listening and connected socket, eventfd, two while it is started
FILES_PER_MODEL_FILE = 2  # buffered and direct
THREADS_PER_PROCESS = 3  # its own and two of ZeroMQ
THREADS_OF_METRICS = 4  # what listens, and answers under way
# CAP_SYS_ADMIN and CAP_SYS_RESOURCE: who has one of them may start as many as there is room for
UNLIMITED_CAPABILITIES = 1 << 21 | 1 << 24


class ResourceError(Exception):
    """The machine does not hold what was asked for: one line with the numbers."""


def check_open_files(n_children: int, n_model_files: int) -> None:
    """Raise the soft limit as far as a run needs; raises `ResourceError` where that is refused."""
    needed = FILES_OF_THE_PROCESS + FILES_PER_CHILD * n_children
    needed += FILES_PER_MODEL_FILE * n_model_files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ResourceError(
            f"open files: expected a limit of at least {needed} (`ulimit -n`), found {hard}; "
            "raise it, or use fewer --io-workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_threads(n_children: int, n_threads: int, root: Path = Path("/")) -> None:
    """See that the user may start so many processes with so many threads besides; what runs already
    counts. Raises `ResourceError`."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY or _is_unlimited(root):
        return
    needed = THREADS_PER_PROCESS * (n_children + 1) + n_threads + THREADS_OF_METRICS
    running = running_threads(os.getuid(), root)
    if running + needed > limit:
        raise ResourceError(
            f"processes: expected a limit of at least {running + needed} (`ulimit -u`: {running} "
            f"threads of this user run, {needed} come), found {limit}; raise it, or use fewer "
            "--io-workers, --queue-depth, --io-threads or --compute-threads"
        )


def running_threads(user: int, root: Path) -> int:
    """Threads of all processes of a user that can be seen."""
    n_threads = 0
    for folder in root.joinpath("proc").glob("[0-9]*"):
        status = _status(folder)
        if status.get("Uid", "").split()[:1] == [str(user)]:
            n_threads += int(status.get("Threads", "1"))
    return n_threads


def _is_unlimited(root: Path) -> bool:
    capabilities = _status(root / "proc/self").get("CapEff", "0")
    return os.getuid() == 0 or bool(int(capabilities, 16) & UNLIMITED_CAPABILITIES)


def _status(folder: Path) -> dict[str, str]:
    """What /proc says of a process; nothing where it is gone."""
    try:
        lines = (folder / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
