"""`moe-coord eval`: logits and chosen experts of given tokens, through the whole engine.

The output file is opened here and its descriptor handed to the compute process: a path that cannot
be written is refused before anything is loaded.
"""

import contextlib
import os
from pathlib import Path

from coordinator.command.commands import EvalCommand
from coordinator.command.flag_values import ConfigError
from coordinator.command.signals import Signals
from coordinator.command.terminal import Terminal
from coordinator.core.actions import Ended
from coordinator.core.state import EndRequest, NewRequest
from coordinator.plan.machine import read_machine
from coordinator.plan.memory_request import OnlySequence
from coordinator.plan.setup import prepared
from coordinator.processes.engine import EngineError
from coordinator.serving.generate import prompt_tokens
from coordinator.serving.runner import Running
from shm.messages import Sampled, Sampling, StepDone, Submit

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0)
EXIT_INTERNAL = 5


class Evaluation:
    """The listener of a prompt that is not answered."""

    def __init__(self) -> None:
        self.ended: Ended | None = None

    def on_tokens(self, sampled: tuple[Sampled, ...]) -> list[EndRequest]:
        """None are drawn."""
        return []

    def on_ended(self, ended: Ended) -> None:
        """See `RequestListener`."""
        self.ended = ended

    def on_step(self, done: StepDone) -> None:
        """Nothing is counted."""


def evaluate(command: EvalCommand, running: Running) -> int:
    """Run it; returns the exit code."""
    with Terminal() as terminal, Signals() as signals:
        n_tokens = len(command.config.prompt_tokens or ())
        only = OnlySequence(n_tokens, n_tokens + 1, keeps_logits=True)
        with prepared(command.config, read_machine(), only) as setup:
            tokens = prompt_tokens(setup, None, None)
            for line in setup.lines():
                terminal.line(line)
            fd = _create(command.out)
            evaluation = Evaluation()
            try:
                with running(setup, terminal, signals, keep_fd=fd) as runner:
                    n_context = setup.plan.context_tokens
                    submit = Submit(1, tuple(tokens), GREEDY, n_context, True)
                    runner.run(NewRequest(submit, 0, frozenset()), evaluation)
            finally:
                _close(fd, is_whole=_is_whole(evaluation))
        ended = evaluation.ended
        if ended is not None and ended.error is not None:
            raise EngineError(EXIT_INTERNAL, ended.error)
        if signals.exit_code is None:
            terminal.line(f"wrote {command.out}: {len(tokens)} tokens")
        return signals.exit_code or 0


def _is_whole(evaluation: Evaluation) -> bool:
    return evaluation.ended is not None and evaluation.ended.reason == "length"


def _close(fd: int, *, is_whole: bool) -> None:
    """What compute wrote before it was killed is not left: a file is whole, or empty."""
    if not is_whole:
        with contextlib.suppress(OSError):  # a pipe
            os.ftruncate(fd, 0)
    os.close(fd)


def _create(path: Path) -> int:
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise ConfigError(
            f"--out: expected a path that can be written, found {str(path)!a:.200}: "
            f"{error.strerror}; give another path"
        ) from error
