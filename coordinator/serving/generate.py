"""The main job: a prompt in, text out, token by token, and one summary line at the end."""

import json
import sys
from typing import Any

from coordinator.command.config import Config
from coordinator.command.flag_values import ConfigError
from coordinator.command.flags import settings_of
from coordinator.command.line import prompt_text
from coordinator.command.signals import Signals
from coordinator.command.streams import write_output
from coordinator.command.terminal import Terminal, TextOutput
from coordinator.command.token_rows import TokenRows, Totals
from coordinator.core.actions import Ended
from coordinator.core.geometry import ExpertCounters
from coordinator.core.state import EndRequest, NewRequest
from coordinator.plan.machine import read_machine
from coordinator.plan.memory_request import OnlySequence
from coordinator.plan.setup import Setup, prepared
from coordinator.processes.engine import EngineError
from coordinator.serving.records import announce, save_usage, warn_of_lost_records
from coordinator.serving.runner import Runner, Running
from coordinator.serving.tally import Tally, record, summary
from coordinator.text.stream import TextStream
from coordinator.text.tokenizer import Tokenizer, build_tokenizer
from shm.messages import Sampled, Sampling, StepDone, Submit

EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_TERMINATED = 5, 130, 143
MADVISING_READERS = ("willneed", "populate")


class Answer:
    """The listener of one request: prints its text as it comes, and counts."""

    def __init__(
        self,
        request: int,
        stream: TextStream | None,
        out: TextOutput | None,
        tally: Tally,
        counters: ExpertCounters,
        rows: TokenRows | None,
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.tally = tally
        self.rows = rows
        self.ended: Ended | None = None
        self._request = request
        self._stream = stream
        self._out = out
        self._counters = counters

    def on_tokens(self, sampled: tuple[Sampled, ...]) -> list[EndRequest]:
        """See `Listener`."""
        ends = []
        for drawn in sampled:
            self.tokens.append(drawn.token)
            self.tally.add_token()
            if self._stream is not None:
                self._print(self._stream.push(drawn.token))
                if self._stream.stopped is not None:
                    ends.append(EndRequest(self._request, "stop"))
        if self._out is not None and self._out.is_closed and not ends:
            ends.append(EndRequest(self._request, "cancelled"))
        return ends

    def on_ended(self, ended: Ended) -> None:
        """See `Listener`."""
        self.ended = ended
        if self._stream is not None:
            self._print(self._stream.finish())

    def on_step(self, done: StepDone) -> None:
        """See `Listener`."""
        self.tally.add_step(done, self._counters)
        if self.rows is not None:
            self.rows.add_step(done)

    def _print(self, piece: str) -> None:
        self.text += piece
        if self._out is not None:
            self._out.write(piece)


def generate(config: Config, running: Running) -> int:
    """Run the main job; returns the exit code. Raises what `prepared` and the engine raise."""
    if config.single_process and config.is_service:
        raise ConfigError(
            "--single-process: expected a prompt (-p, -f, --tokens), found none: the service has "
            "processes; give a prompt, or drop --single-process"
        )
    with Terminal(quiet=config.json) as terminal, Signals() as signals:
        prompt = prompt_text(config, sys.stdin.buffer)
        with prepared(config, read_machine(), only_sequence(config, prompt)) as setup:
            tokenizer = _tokenizer(setup, needed=config.prompt_tokens is None)
            tokens = prompt_tokens(setup, tokenizer, prompt)
            announce(setup, terminal)
            with running(setup, terminal, signals) as runner:
                try:
                    return _answer(runner, tokenizer, tokens, 1)
                finally:
                    save_usage(setup, runner.core, terminal)
                    warn_of_lost_records(setup, terminal)


def only_sequence(config: Config, prompt: str | None) -> OnlySequence | None:
    """How long a given prompt and its answer can become; None without a prompt.

    Text is not tokenized yet. A token of text has a byte at least, two may be added around it.
    """
    if config.prompt_tokens is not None:
        n_prompt = len(config.prompt_tokens)
    elif prompt is not None:
        n_prompt = len(prompt.encode()) + 2
    else:
        return None
    return OnlySequence(n_prompt, n_prompt + config.max_tokens)


def _tokenizer(setup: Setup, *, needed: bool) -> Tokenizer | None:
    """The model's tokenizer; with `--tokens` a file without one still works."""
    if not needed and "tokenizer.ggml.tokens" not in setup.model.metadata:
        return None
    return build_tokenizer(setup.model.metadata, str(setup.config.model))


def prompt_tokens(setup: Setup, tokenizer: Tokenizer | None, prompt: str | None) -> list[int]:
    """The prompt as ids, checked against vocabulary and context. Raises `ConfigError`."""
    if setup.config.prompt_tokens is not None:
        tokens = list(setup.config.prompt_tokens)
    else:
        assert prompt is not None and tokenizer is not None
        tokens = tokenizer.encode(prompt, add_special=True, parse_special=True)
    size = setup.spec.vocabulary_size
    beyond = [token for token in tokens if token >= size]
    if beyond:
        raise ConfigError(
            f"--tokens: expected ids below {size} (the vocabulary), found {beyond[0]}; "
            "give other ids"
        )
    if not tokens:
        raise ConfigError("--prompt: expected some text, found none; give a prompt")
    limit = setup.plan.context_tokens
    if len(tokens) >= limit:
        raise ConfigError(
            f"--prompt: expected fewer than {limit} tokens (the context), found {len(tokens)}; "
            "shorten it, or use a larger --context"
        )
    return tokens


def _answer(runner: Runner, tokenizer: Tokenizer | None, tokens: list[int], request: int) -> int:
    """Generate one answer, print it, sum it up; returns the exit code."""
    config = runner.setup.config
    assert config.seed is not None  # drawn by `config.resolve`
    if config.temperature > 0:
        runner.terminal.line(f"seed: {config.seed}")
    out = None if config.json else TextOutput()
    stream = TextStream(tokenizer, config.stop) if tokenizer is not None else None
    counters, rows = runner.core.residency.counters, runner.setup.rows
    if rows is not None:
        rows.begin(request, lambda: _totals(runner))
    answer = Answer(request, stream, out, Tally(len(tokens)), counters, rows)
    stop_ids = frozenset() if config.ignore_eos or not tokenizer else tokenizer.stop_ids
    submit = Submit(
        request, tuple(tokens), _sampling(config), runner.setup.plan.context_tokens, False
    )
    runner.run(NewRequest(submit, config.max_tokens, stop_ids), answer)
    if out is not None and tokenizer is None:
        out.write(" ".join(map(str, answer.tokens)))
    if out is not None:
        out.write("\n")
    return _report(runner, answer)


def _sampling(config: Config) -> Sampling:
    assert config.seed is not None
    return Sampling(
        float(config.temperature),
        config.top_k,
        float(config.top_p),
        float(config.min_p),
        float(config.repeat_penalty),
        config.seed,
    )


def _report(runner: Runner, answer: Answer) -> int:
    """Summary or JSON; the exit code that the way it ended asks for."""
    ended = answer.ended
    assert ended is not None
    setup = runner.setup
    if setup.config.json:
        write_output(json.dumps(_record(runner, answer), ensure_ascii=False) + "\n")
    elif ended.error is None:
        runner.terminal.line(summary(answer.tally, runner.core.residency, runner.disk_use()))
    if ended.error is not None:
        raise EngineError(EXIT_INTERNAL, ended.error)
    if runner.signals.exit_code is not None:
        return runner.signals.exit_code
    return 0


def _record(runner: Runner, answer: Answer) -> dict[str, Any]:
    setup, ended = runner.setup, answer.ended
    assert ended is not None
    return {
        "model": str(setup.config.model),
        "prompt_tokens": answer.tally.n_prompt,
        "tokens": answer.tokens,
        "text": answer.text,
        "stop_reason": ended.reason,
        **({"error": ended.error} if ended.error else {}),
        **record(answer.tally, runner.core.residency, setup, runner.peak_bytes, runner.disk_use()),
        "settings": {
            **settings_of(setup.config),
            **runner.found_settings,
            "reads_in_flight": setup.reads_in_flight,
        },
    }


def _totals(runner: Runner) -> Totals:
    """What `--csv` wants to know after each token."""
    residency, reader = runner.core.residency, runner.setup.reader.name
    counters = residency.counters
    return Totals(
        bytes_read=counters.bytes_read if residency.knows_hits else runner.disk_use().bytes_read,
        madvise_ns=counters.read_ns if reader in MADVISING_READERS else 0,
        requests=counters.requests,
        hits=counters.hits if residency.knows_hits else None,
    )
