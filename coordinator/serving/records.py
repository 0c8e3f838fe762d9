"""What every job that runs the engine says at its beginning, and saves at its end."""

from statistics import median

from coordinator.command.terminal import Terminal
from coordinator.core.state import Core
from coordinator.plan.setup import Setup
from coordinator.routing.trace_statistics import n_for_share
from coordinator.routing.usage import write_usage

HOT_SHARE = 0.8  # of a layer's uses: how many experts make it up is told


def announce(setup: Setup, terminal: Terminal) -> None:
    """The first lines: what runs, and how."""
    for line in setup.lines():
        terminal.line(line)
    warning = setup.plan.warning()
    if warning and setup.config.policy == "lru":
        terminal.warning(warning)


def save_usage(setup: Setup, core: Core, terminal: Terminal) -> None:
    """Add what was used to the counts of `--usage` and save them."""
    path = setup.config.usage
    if path is None:
        return
    usage = setup.usage
    for key, n_uses in core.residency.uses.items():
        usage.counts[key] = usage.counts.get(key, 0.0) + n_uses
    try:
        write_usage(path, usage)
    except OSError as error:
        terminal.warning(f"--usage: cannot save {path}: {error.strerror}")
        return
    n_hot = median(n_for_share(uses, HOT_SHARE) for uses in usage.of_layers())
    terminal.line(
        f"counts of {sum(usage.counts.values()):.0f} uses saved in {path}: {n_hot:g} of "
        f"{usage.n_experts} experts make up {100 * HOT_SHARE:.0f} % of a layer's"
    )


def warn_of_lost_records(setup: Setup, terminal: Terminal) -> None:
    """Files that could not be written to their end."""
    for flag, recorder in (("--trace", setup.trace), ("--csv", setup.rows)):
        if recorder is not None and recorder.failure is not None:
            terminal.warning(f"{flag}: the file is cut short: {recorder.failure.strerror}")
