"""Limits of this process (`ulimit`) that a run needs, seen to before anything is started.

ZeroMQ ends the whole process when it meets the limit of open files: it must not come to that.
"""

import resource

from coordinator.budget import ResourceError

# standard streams, the pool twice, ZeroMQ's own (3 eventfds, 2 epoll), a file of /proc; measured 22
FILES_OF_THE_PROCESS = 28
FILES_PER_CHILD = 6  # pidfd, listening and connected socket, eventfd, two while it is started
FILES_PER_MODEL_FILE = 2  # buffered and direct


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
