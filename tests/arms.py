"""Whole runs of the program with different settings, for tests that compare them.

An arm is a tuple of flags. `run_arm` starts the program as a user would and returns what it
computed; `run_together` lets several sequences share their steps.
"""

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coordinator.command.config import Config
from coordinator.command.line import parse
from coordinator.core.actions import Ended
from coordinator.core.state import EndRequest, NewRequest
from coordinator.plan.machine import read_machine
from coordinator.plan.setup import prepared
from coordinator.serving.start import started
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


def pack(model: Path, out: Path) -> Path:
    """The packed file of a model."""
    done = run_program("pack", str(model), str(out))
    assert done.returncode == 0, done.stderr
    return out


def run_json(*arguments: str) -> dict[str, Any]:
    """The JSON of a run that must succeed."""
    done = run_program(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def spelled(tokens: list[int]) -> str:
    """Token ids as `--tokens` takes them."""
    return ",".join(map(str, tokens))


class Computed(NamedTuple):
    """What must be equal, bit by bit: logits and chosen experts of the prompt, the new tokens."""

    logits: bytes
    topk: bytes
    tokens: list[int]


def run_arm(
    model: Path, tokens: list[int], flags: tuple[str, ...], out: Path, n_new: int
) -> Computed:
    """What one arm computes."""
    run = _program_arm if "--single-process" in flags else _engine_arm
    drawn = run(model, tokens, flags, out, n_new)
    return Computed(*kept_of(out, len(tokens)), drawn)


def kept_of(path: Path, n_prompt: int) -> tuple[bytes, bytes]:
    """Logits and chosen experts of the prompt; those of new tokens may stand behind."""
    with np.load(path) as kept:
        return kept["logits"][:n_prompt].tobytes(), kept["topk"][:, :n_prompt].tobytes()


def _program_arm(
    model: Path, tokens: list[int], flags: tuple[str, ...], out: Path, n_new: int
) -> list[int]:
    """As a user would: the evaluation, then the answer."""
    evaluation = run_program(
        "eval", str(model), "--tokens", spelled(tokens), "--out", str(out), *flags
    )
    assert evaluation.returncode == 0, (flags, evaluation.stderr)
    record = run_json(
        "--model", str(model), "--tokens", spelled(tokens), "-n", str(n_new),
        "--ignore-eos", "--temperature", "0.9", "--seed", "101", "--numerics", "exact", *flags,
    )  # fmt: skip
    found: list[int] = record["tokens"]
    return found


def _engine_arm(
    model: Path, tokens: list[int], flags: tuple[str, ...], out: Path, n_new: int
) -> list[int]:
    """Both at once, with the coordinator in this process: half the time."""
    return run_kept(model, submit_of(1, tokens), flags, out, n_new)


def run_kept(
    model: Path, submit: Submit, flags: tuple[str, ...], out: Path, n_new: int
) -> list[int]:
    """New tokens of a request; logits and chosen experts of all its tokens go to `out`."""
    listener = Together()
    with (
        out.open("wb") as file,
        prepared(exact_config(model, flags), read_machine()) as setup,
        started(setup, listener, keep_fd=file.fileno()) as engine,
    ):
        while not engine.is_ready:
            engine.run_once()
        if setup.plan.everything_fits:
            engine.preload()
        while engine.n_loading:
            engine.run_once()
        kept = dataclasses.replace(submit, keep_logits=True)
        engine.submit(NewRequest(kept, n_new, frozenset()))
        while not listener.ended:
            engine.run_once()
    assert listener.ended[submit.request].error is None
    return listener.tokens[submit.request]


def exact_config(model: Path, flags: tuple[str, ...]) -> Config:
    """The config of a run with exact numerics; prompts are given to the engine."""
    config = parse(["--model", str(model), "--tokens", "1", "--numerics", "exact", *flags])
    assert isinstance(config, Config)
    return config


@dataclass
class Together:
    """Listener of several requests that run at once."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    step_sizes: list[int] = field(default_factory=list)
    n_steps: int = 0

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
        """Count."""
        self.n_steps += 1

    def on_progress(self, process: str, phase: str, done: int, total: int) -> None:
        """Not looked at."""

    def on_event(self, line: str) -> None:
        """Collect."""
        self.events.append(line)


def greedy(request: int, prompt: list[int], n_context: int = 512) -> Submit:
    """A request that takes the likeliest token."""
    return Submit(request, tuple(prompt), Sampling(0.0, 0, 1.0, 0.0, 1.0, 0), n_context, False)


def submit_of(request: int, prompt: list[int], n_context: int = 512) -> Submit:
    """A request that samples at temperature 0.9 with its own seed."""
    sampling = Sampling(0.9, 0, 1.0, 0.0, 1.0, 100 + request)
    return Submit(request, tuple(prompt), sampling, n_context, False)


def run_together(
    model: Path,
    prompts: dict[int, list[int]],
    n_new: int,
    flags: tuple[str, ...] = (),
    *,
    max_running: int = 4,
) -> Together:
    """All prompts as requests of one engine: at once, or one after another (`max_running` 1)."""
    listener = Together()
    with (
        prepared(exact_config(model, flags), read_machine(), n_sequences=max_running) as setup,
        started(setup, listener) as engine,
    ):
        for request, prompt in prompts.items():
            engine.submit(NewRequest(submit_of(request, prompt), n_new, frozenset()))
        while len(listener.ended) < len(prompts):
            engine.run_once()
    return listener
