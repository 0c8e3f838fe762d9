"""The service: requests come from the HTTP process, steps are shared, until a signal.

Stands between the HTTP process and the engine: gives every request a number of the core, sends
tokens and ends back, tells the state, and drains when a signal comes. Knows token ids only; text
and clients are the HTTP process's (see `coordinator.api`).
"""

import contextlib
import time
from typing import Any

from coordinator.command.config import Config
from coordinator.command.signals import Signals
from coordinator.command.terminal import Terminal
from coordinator.core.actions import Ended
from coordinator.core.request import Phase
from coordinator.core.state import EndRequest, NewRequest
from coordinator.metrics.exposition import Exposition, run_view
from coordinator.metrics.http_totals import HttpTotals
from coordinator.metrics.server import listen as listen_for_metrics
from coordinator.metrics.server import serving
from coordinator.plan.machine import read_machine
from coordinator.plan.setup import Setup, prepared
from coordinator.processes.engine import COMPUTE, Engine
from coordinator.processes.launch import HTTP, ChildSpec
from coordinator.serving.answers import ExpertTotals, RunningAnswer, expert_totals
from coordinator.serving.notify import Notifier
from coordinator.serving.rates import Noted, Rates
from coordinator.serving.records import announce, save_usage, warn_of_lost_records
from coordinator.serving.runner import wait_ready
from coordinator.serving.service_setup import http_spec
from coordinator.serving.service_socket import check_reachable, listen, url_of
from coordinator.serving.session import open_session, restore, save
from coordinator.serving.start import started
from coordinator.serving.status import StatusReport
from shm.messages import Sampled, StepDone, Submit
from shm.service_messages import (
    Began,
    Drawn,
    EndGeneration,
    Generate,
    GenerationEnded,
    HttpGrowth,
    PromptProgress,
    ServiceState,
    StatusSnapshot,
    WantStatus,
)

DEFAULT_METRICS_PORT = 9400
STARTING, READY, DEGRADED, DRAINING = "starting", "ready", "degraded", "draining"
LAST_SECONDS = 5.0  # for requests that were ended to be over


def serve(config: Config) -> int:
    """Run the service; returns the exit code. Raises what `prepared` and the engine raise."""
    check_reachable(config)
    with (
        Terminal(quiet=config.json) as terminal,
        Signals() as signals,
        contextlib.ExitStack() as stack,
    ):
        listener = stack.enter_context(listen(config))
        port = config.metrics_port if config.metrics_port is not None else DEFAULT_METRICS_PORT
        host = config.metrics_host
        metrics = stack.enter_context(listen_for_metrics(port, host)) if port else None
        notifier = stack.enter_context(Notifier(config.notify_socket))
        setup = stack.enter_context(prepared(config, read_machine(), None, config.parallel))
        announce(setup, terminal)
        service = Service(setup, terminal, signals, http_spec(setup, listener), notifier)
        session = stack.enter_context(open_session(setup))
        fds = session.fds if session is not None else ()
        engine = stack.enter_context(started(setup, service, front=service, compute_fds=fds))
        view = run_view(engine, setup, service.http)
        service.attach(engine, StatusReport(engine, setup, view))
        if metrics is not None:
            stack.enter_context(serving(metrics, Exposition(view)))
            terminal.line(f"metrics: http://{host}:{port}/metrics")
        wait_ready(engine, setup, terminal, signals, lambda: notifier.alive(time.monotonic()))
        if session is not None:
            restore(session, engine, setup, terminal)
        notifier.ready(f"serving {url_of(listener)}/")
        terminal.line(f"ready: {url_of(listener)}/ waits for requests until SIGTERM")
        try:
            service.run()
            if session is not None:
                save(session, engine, setup, terminal)
        finally:
            save_usage(setup, engine.core, terminal)
            warn_of_lost_records(setup, terminal)
        return signals.exit_code or 0


class Service:
    """Listener and front of the engine."""

    def __init__(
        self,
        setup: Setup,
        terminal: Terminal,
        signals: Signals,
        spec: ChildSpec,
        notifier: Notifier,
    ) -> None:
        self.http = HttpTotals()
        self._setup = setup
        self._terminal = terminal
        self._signals = signals
        self._spec = spec
        self._notifier = notifier
        self._attached: tuple[Engine, StatusReport] | None = None
        self._rates = Rates(time.monotonic_ns())
        self._answers: dict[int, RunningAnswer] = {}  # by number of the core, oldest first
        self._core_number: dict[int, int] = {}  # by number of the HTTP process
        self._n_requests = 0
        self._state = (STARTING, False)

    def attach(self, engine: Engine, report: StatusReport) -> None:
        """The engine is there; called once, before its first `run_once`."""
        self._attached = (engine, report)

    @property
    def spec(self) -> ChildSpec:
        """See `Front`."""
        return self._spec

    @property
    def _engine(self) -> Engine:
        assert self._attached is not None
        return self._attached[0]

    def run(self) -> None:
        """Serve until a signal, then let the running answers end. Raises `EngineError`."""
        while self._signals.received is None:
            self._turn()
        self._notifier.stopping()
        deadline = time.monotonic() + self._setup.config.drain_seconds
        if self._answers:
            self._terminal.line(f"draining: {len(self._answers)} request(s) end first")
        while self._answers and time.monotonic() < deadline:
            self._turn()
        for number in list(self._answers):
            self._engine.end(EndRequest(number, "cancelled"))
        deadline = time.monotonic() + LAST_SECONDS
        while self._answers and time.monotonic() < deadline:
            self._turn()

    def _turn(self) -> None:
        self._tell_state()
        self._engine.run_once()
        self._tell_begun()
        self._notifier.alive(time.monotonic())
        now_ns = time.monotonic_ns()
        if self._rates.is_due(now_ns):
            self._rates.note(self._noted(now_ns))

    def _tell(self, message: Any) -> None:
        """Say something to the HTTP process; if it is not up, to nobody."""
        if self._engine.is_up(HTTP):
            self._engine.send(HTTP, message)

    # State

    def _tell_state(self) -> None:
        state = self._state_now()
        if state != self._state:
            self._state = state
            self._tell(ServiceState(*state))
            self._terminal.line(f"event=state state={state[0]} can_answer={state[1]}")

    def _state_now(self) -> tuple[str, bool]:
        """And whether a request that comes now could be answered."""
        engine = self._engine
        workers = [name for name in engine.names if name != HTTP]
        readers = engine.totals.readers
        is_able = engine.is_up(COMPUTE) and any(engine.is_up(name) for name in readers or workers)
        if self._signals.received is not None:
            return DRAINING, False
        if all(engine.is_up(name) for name in workers):
            return READY, True
        return DEGRADED, is_able

    def _expert_totals(self) -> ExpertTotals:
        residency = self._engine.core.residency
        return expert_totals(
            residency.counters, self._engine.totals.standing_uses, knows_hits=residency.knows_hits
        )

    def _noted(self, now_ns: int) -> Noted:
        totals, experts = self._engine.totals, self._expert_totals()
        decode = totals.phases["decode"]
        return Noted(
            now_ns,
            totals.prompt_tokens,
            totals.generated_tokens,
            experts.requests,
            experts.hits,
            experts.bytes_read,
            decode.compute_ns,
            decode.wait_disk_ns,
            decode.coordination_ns,
        )

    # What the HTTP process says

    def started(self) -> None:
        """See `Front`."""
        self._tell(ServiceState(*self._state))

    def died(self) -> None:
        """See `Front`. Nobody listens to its requests any more."""
        self._core_number.clear()
        self.http.died()
        for number in list(self._answers):
            self._engine.end(EndRequest(number, "cancelled"))

    def received(self, message: Any) -> None:
        """See `Front`."""
        match message:
            case Generate():
                self._generate(message)
            case EndGeneration(request, reason):
                number = self._core_number.get(request)
                if number is not None and reason in ("stop", "cancelled"):
                    self._engine.end(EndRequest(number, reason))
            case HttpGrowth():
                self.http.grow(message)
            case WantStatus() if self._attached is not None:
                report = self._attached[1]
                text = report.snapshot(
                    time.monotonic_ns(), self._state[0], self._rates, self._answers
                )
                self._tell(StatusSnapshot(text))

    def _generate(self, wanted: Generate) -> None:
        self._n_requests += 1
        number = self._n_requests
        now_ns = time.monotonic_ns()
        self._answers[number] = RunningAnswer(wanted.request, len(wanted.prompt), now_ns)
        self._core_number[wanted.request] = number
        context = self._setup.plan.context_tokens
        submit = Submit(
            number, wanted.prompt, wanted.sampling, context, False, wanted.n_top_logprobs
        )
        self._engine.submit(NewRequest(submit, wanted.max_tokens, frozenset(wanted.stop_ids)))

    def _tell_begun(self) -> None:
        """Requests leave the queue in order."""
        for number, answer in self._answers.items():
            if answer.began_ns is not None:
                continue
            request = self._engine.core.requests.of(number)
            if request is None or request.phase is Phase.QUEUED:
                return
            answer.begin(time.monotonic_ns(), self._expert_totals(), request.n_cached)
            self._tell(Began(answer.number, request.n_cached))

    # What the engine says

    def _asked(self, number: int) -> RunningAnswer | None:
        """Unless by an HTTP process that is gone: the next one counts from 1 again."""
        answer = self._answers.get(number)
        return answer if answer and self._core_number.get(answer.number) == number else None

    def on_tokens(self, sampled: tuple[Sampled, ...]) -> list[EndRequest]:
        """See `Listener`. Stop strings are text: `EndGeneration` tells of them."""
        now_ns, drawn = time.monotonic_ns(), []
        for token in sampled:
            answer = self._asked(token.request)
            if answer is not None:
                answer.add_token(now_ns)
                drawn.append(Sampled(answer.number, token.token, token.logprob, token.top))
        self._tell(Drawn(tuple(drawn)))
        return []

    def on_ended(self, ended: Ended) -> None:
        """See `Listener`."""
        answer = self._asked(ended.request)
        self._answers.pop(ended.request, None)
        if answer is not None:
            del self._core_number[answer.number]
            figures = answer.figures(time.monotonic_ns(), self._expert_totals())
            self._tell(GenerationEnded(answer.number, ended.reason, ended.error, figures))

    def on_step(self, done: StepDone) -> None:
        """See `Listener`."""

    def on_progress(self, process: str, phase: str, done: int, total: int) -> None:
        """See `Listener`. `done` and `total` of a prompt are tokens times layers."""
        if phase != "prompt":
            self._terminal.progress(f"{process} {phase}", done, total)
            return
        step, n_layers = self._engine.core.requests.running_step, self._setup.spec.n_layers
        answer = self._asked(step.slices[0].request) if step is not None else None
        if answer is not None:
            self._tell(PromptProgress(answer.number, done // n_layers, total // n_layers))

    def on_event(self, line: str) -> None:
        """See `Listener`."""
        self._terminal.line(line)
