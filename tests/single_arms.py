"""Arms with ``--single-process`` one after another in one process of their own.

    python -P tests/single_arms.py MODEL FOLDER ARM…

An arm is its number among `covering_arms`. Writes FOLDER/NUMBER.npz (logits and chosen experts) and
prints a JSON object: number -> new tokens. A start per arm would cost more than the arms.
"""

import dataclasses
import json
import sys
from pathlib import Path

from arms import Together, exact_config, submit_of
from identical import N_NEW_TOKENS, covering_arms, describe, flags_of, model_of

from coordinator.command.signals import Signals
from coordinator.command.terminal import Terminal
from coordinator.core.state import NewRequest
from coordinator.plan.machine import read_machine
from coordinator.plan.setup import prepared
from coordinator.single_process import running


def run_single(model: Path, flags: tuple[str, ...], tokens: list[int], out: Path) -> list[int]:
    """The new tokens of one arm."""
    listener = Together()
    with (
        out.open("wb") as file,
        prepared(exact_config(model, flags), read_machine()) as setup,
        running(setup, Terminal(quiet=True), Signals(), keep_fd=file.fileno()) as runner,
    ):
        submit = dataclasses.replace(submit_of(1, tokens), keep_logits=True)
        runner.run(NewRequest(submit, N_NEW_TOKENS, frozenset()), Alone(listener))
    return listener.tokens[1]


class Alone:
    """A listener of one request over one of several."""

    def __init__(self, listener: Together) -> None:
        self._listener = listener
        self.on_tokens = listener.on_tokens
        self.on_ended = listener.on_ended
        self.on_step = listener.on_step

    @property
    def ended(self) -> object:
        """None while it runs."""
        return self._listener.ended.get(1)


def main() -> None:
    """Run the arms."""
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    tokens, _ = describe(model)
    arms = covering_arms()
    found = {}
    for number in map(int, sys.argv[3:]):
        flags, own = flags_of(arms[number], model), model_of(arms[number], model)
        found[number] = run_single(own, flags, tokens, folder / f"{number}.npz")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
