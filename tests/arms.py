"""Whole runs of the program with different settings, for tests that compare them.

An arm is a tuple of flags. `run_arm` starts the program as a user would and returns what it
computed; `run_together` lets several sequences share their steps.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.actions import Ended
from coordinator.command_line import parse
from coordinator.config import Config
from coordinator.machine import read_machine
from coordinator.setup import prepared
from coordinator.start import started
from coordinator.state import EndRequest, NewRequest
from shm.messages import Sampled, Sampling, StepDone, Submit

TIMEOUT_SECONDS = 100
PROGRAM = [sys.executable, "-P", "-m", "coordinator"]


def run_program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """``moe-coord`` with these arguments, its output captured."""
    return subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


def run_json(*arguments: str) -> dict[str, Any]:
    """The JSON of a run that must succeed."""
    done = run_program(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def spelled(tokens: list[int]) -> str:
    """Token ids as `--tokens` takes them."""
    return ",".join(map(str, tokens))


def run_arm(
    model: Path, tokens: list[int], flags: tuple[str, ...], out: Path, n_new: int
) -> tuple[bytes, bytes, list[int]]:
    """Logits and chosen experts of the prompt, and the new tokens, of one arm."""
    evaluation = run_program(
        "eval", str(model), "--tokens", spelled(tokens), "--out", str(out), *flags
    )
    assert evaluation.returncode == 0, (flags, evaluation.stderr)
    with np.load(out) as kept:
        logits, topk = kept["logits"].tobytes(), kept["topk"].tobytes()
    record = run_json(
        "--model", str(model), "--tokens", spelled(tokens), "-n", str(n_new),
        "--ignore-eos", "--temperature", "0.9", "--seed", "7", "--numerics", "exact", *flags,
    )  # fmt: skip
    return logits, topk, record["tokens"]


@dataclass
class Together:
    """Listener of several requests that run at once."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    step_sizes: list[int] = field(default_factory=list)

    def on_tokens(self, sampled: tuple[Sampled, ...]) -> list[EndRequest]:
        """Collect."""
        self.step_sizes.append(len(sampled))
        for drawn in sampled:
            self.tokens.setdefault(drawn.request, []).append(drawn.token)
        return []

    def on_ended(self, ended: Ended) -> None:
        """Collect."""
        self.ended[ended.request] = ended

    def on_step(self, done: StepDone) -> None:
        """Not looked at."""

    def on_progress(self, process: str, phase: str, done: int, total: int) -> None:
        """Not looked at."""

    def on_event(self, line: str) -> None:
        """Collect."""
        self.events.append(line)


def submit_of(request: int, prompt: list[int], n_context: int = 512) -> Submit:
    """A request that samples at temperature 0.9 with its own seed."""
    sampling = Sampling(0.9, 0, 1.0, 0.0, 1.0, 100 + request)
    return Submit(request, tuple(prompt), sampling, n_context, False)


def run_together(
    model: Path, prompts: dict[int, list[int]], n_new: int, flags: tuple[str, ...] = ()
) -> Together:
    """All prompts as requests of one engine, at once."""
    config = parse(["--model", str(model), "--tokens", "1", "--numerics", "exact", *flags])
    assert isinstance(config, Config)
    listener = Together()
    with (
        prepared(config, read_machine()) as setup,
        started(setup, listener, max_running=len(prompts)) as engine,
    ):
        for request, prompt in prompts.items():
            engine.submit(NewRequest(submit_of(request, prompt), n_new, frozenset()))
        while len(listener.ended) < len(prompts):
            engine.run_once()
    return listener
