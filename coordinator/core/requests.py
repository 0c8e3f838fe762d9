"""Composition of steps: which sequences compute what next. The other half of the decision core.

One step runs at a time. Sequences that decode do so together, one token each. Prompts are processed
in chunks, in order; what a chunk has room for after the first prompt goes to the next ones, so that
an expert which several need is read once. While others decode, a chunk is cut at layer boundaries
and their steps go in between: nothing is read twice, and nobody waits longer than a few layers.

Whether a request is over is decided here for `eos` and `length`; stop strings need text, which
this module does not know: the receiver of `Deliver` says so with `end`.
"""

from collections import deque
from dataclasses import replace

from compute_worker.arch import KV_BLOCK_TOKENS
from coordinator.core.actions import Action, Deliver, Ended, ToCompute
from coordinator.core.prefixes import KeptPrefixes
from coordinator.core.request import Phase, Request, Restore
from coordinator.core.schedule import N_LAYERS_BETWEEN_DECODES, Schedule
from shm.messages import Cancel, Finished, Forget, LoadBlocks, Slice, Step, StepDone, Submit


class Requests:
    """All requests that are not over, and the step that runs."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._requests: dict[int, Request] = {}
        self._queue: deque[int] = deque()
        self._step: Step | None = None
        self._n_steps = 0
        self._n_guesses = 0
        self._decode_next = False  # after a part of a chunk, the others have their turn
        self._chunk: tuple[Slice, ...] = ()  # of prompts, computed up to `_chunk_layer`
        self._chunk_layer = 0
        self._failure: str | None = None
        self._ending: dict[int, str] = {}  # ended while their step runs: request -> reason
        self._prefixes = KeptPrefixes()

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._requests

    @property
    def running_step(self) -> Step | None:
        """The step that compute works on."""
        return self._step

    @property
    def may_stop(self) -> bool:
        """Whether the running step may end early: something of it failed, or who wanted it left."""
        return self._failure is not None or bool(self._ending)

    def of(self, request: int) -> Request | None:
        """A request that is not over."""
        return self._requests.get(request)

    @property
    def n_kept_blocks(self) -> int:
        """KV blocks of sequences that are over, kept for those that begin like them."""
        return self._prefixes.n_blocks

    @property
    def kept_sequences(self) -> dict[int, tuple[int, ...]]:
        """Tokens of the ended sequences whose blocks are kept, least recently used first."""
        return self._prefixes.sequences()

    def restore(self, restored: Restore) -> list[Action]:
        """Blocks of an ended sequence come from a file, before the first request."""
        n_blocks, _ = self._prefixes.keep(restored.number, restored.tokens, None)
        if not n_blocks:
            return []
        return [ToCompute(LoadBlocks(restored.number, n_blocks, restored.fd, restored.offset))]

    def submit(self, submit: Submit, max_tokens: int, stop_ids: frozenset[int]) -> list[Action]:
        """A new request joins the queue, if the KV cache can hold it at all."""
        request = Request(submit, max_tokens, stop_ids)
        quota = self._schedule.n_kv_blocks
        if quota is not None and request.n_kv_blocks > quota:
            text = (
                f"KV cache: expected at most {quota * KV_BLOCK_TOKENS} tokens of prompt and "
                f"answer, found {request.n_prompt} and {max_tokens}; ask for fewer, or start with "
                "a larger --context"
            )
            return [Ended(submit.request, "error", text)]
        self._requests[submit.request] = request
        self._queue.append(submit.request)
        return []

    def end(self, request: int, reason: str) -> list[Action]:
        """End a request from outside: a stop string, or its client is gone."""
        if request not in self._requests:
            return []
        if self._step and any(part.request == request for part in self._step.slices):
            self._ending[request] = reason
            # one that leaves does not take the others' step with it
            is_alone = all(part.request in self._ending for part in self._step.slices)
            return [ToCompute(Cancel(request))] if reason == "cancelled" and is_alone else []
        return self._finish(request, reason)

    def fail_step(self, text: str) -> None:
        """All requests of the running step end with this error when compute has stopped."""
        self._failure = text

    def compute_died(self, text: str) -> list[Action]:
        """The sequences that compute held are lost; what was only queued goes on."""
        self._step, self._failure = None, None
        self._ending.clear()
        self._chunk = ()
        self._prefixes.clear()
        lost = [r for r, request in self._requests.items() if request.phase is not Phase.QUEUED]
        for request in lost:
            del self._requests[request]
        return [Ended(request, "error", text) for request in lost]

    # One step ends

    def handle_done(self, done: StepDone) -> list[Action]:
        """Take the step's tokens into account and say who is over."""
        step, self._step = self._step, None
        assert step is not None and step.step == done.step, f"step {done.step} was not running"
        actions: list[Action] = []
        if self._failure is not None:
            text, self._failure = self._failure, None
            for part in step.slices:
                actions += self._finish(part.request, "error", text)
        elif not done.cancelled:
            actions += self._advance(step)
            actions += self._sampled(done)
        ending, self._ending = self._ending, {}
        for request, reason in ending.items():
            actions += self._finish(request, reason)
        return actions

    def _advance(self, step: Step) -> list[Action]:
        """Note what is in the KV cache now; a request that wants no token (`eval`) is over."""
        actions: list[Action] = []
        is_chunk = self._requests[step.slices[0].request].phase is Phase.PROMPT
        self._decode_next = is_chunk
        if step.stop_layer < self._schedule.n_layers:
            self._chunk_layer = step.stop_layer
            return []
        if is_chunk:
            self._chunk = ()
        for part in step.slices:
            request = self._requests[part.request]
            request.n_done = part.start + part.n_tokens
            if request.phase is Phase.PROMPT and request.n_done >= request.n_prompt:
                request.phase = Phase.DECODE
            if request.phase is Phase.DECODE and request.max_tokens == 0:
                actions += self._finish(part.request, "length")
        return actions

    def _sampled(self, done: StepDone) -> list[Action]:
        actions: list[Action] = [Deliver(done.sampled)] if done.sampled else []
        for sampled in done.sampled:
            request = self._requests[sampled.request]
            request.tokens.append(sampled.token)
            if sampled.token in request.stop_ids:
                actions += self._finish(sampled.request, "eos")
            elif (
                len(request.tokens) >= request.max_tokens
                or request.n_prompt + len(request.tokens) >= request.submit.n_context
            ):
                actions += self._finish(sampled.request, "length")
        return actions

    def _finish(self, request: int, reason: str, error: str | None = None) -> list[Action]:
        gone = self._requests.pop(request, None)
        if gone is None:
            return []
        if gone.phase is Phase.QUEUED:
            self._queue.remove(request)
            return [Ended(request, reason, error)]
        return [*self._let_go(request, gone, reason), Ended(request, reason, error)]

    def _let_go(self, number: int, request: Request, reason: str) -> list[Action]:
        """Compute forgets a sequence, or keeps what the next one may begin with."""
        n_kept, forgotten = 0, list[int]()
        if self._schedule.keeps_prefixes and not request.submit.keep_logits:
            tokens = (*request.submit.prompt, *request.tokens)[: request.n_done]
            n_kept, forgotten = self._prefixes.keep(number, tokens, request.shared)
        self._prefixes.drop_user(request.shared)
        self._chunk = tuple(part for part in self._chunk if part.request != number)
        finished = ToCompute(Finished(number, reason, n_kept))
        return [finished, *(ToCompute(Forget(other)) for other in forgotten)]

    # The next step begins

    def compose(self, n_guesses: int = 0) -> list[Action]:
        """The next step, if one can run now; `n_guesses`: see `Step`."""
        if self._step is not None:
            return []
        self._n_guesses = n_guesses
        actions: list[Action] = []
        self._admit(actions)
        decoding = [
            (number, request)
            for number, request in self._requests.items()
            if request.phase is Phase.DECODE
        ]
        has_prompts = any(r.phase is Phase.PROMPT for r in self._requests.values())
        if decoding and (not has_prompts or self._decode_next):
            slices = tuple(Slice(n, request.n_done, 1, True) for n, request in decoding)
            self._decode_next = False
            actions.append(self._begin(slices, 0, self._schedule.n_layers))
        elif has_prompts:
            actions.append(self._prompt_step(others_wait=bool(decoding)))
        return actions

    def _admit(self, actions: list[Action]) -> None:
        """The first in the queue begin, as many as can end: each has reserved all KV blocks that it
        may need, so that no step ever finds the cache full."""
        running = [r for r in self._requests.values() if r.phase is not Phase.QUEUED]
        while self._queue and len(running) < self._schedule.max_running:
            request = self._requests[self._queue[0]]
            if self._schedule.keeps_prefixes and not request.submit.keep_logits:
                request.shared = self._prefixes.take(request.submit.prompt)
            if not self._has_room([*running, request]):
                self._prefixes.drop_user(request.shared)
                request.shared = None
                break
            self._queue.popleft()
            request.phase = Phase.PROMPT
            running.append(request)
            actions += self._begin_sequence(request, running)

    def _has_room(self, running: list[Request]) -> bool:
        """Whether these can all end, if nothing is kept but what they share."""
        quota = self._schedule.n_kv_blocks
        shared = {block for r in running if r.shared for block in r.shared.blocks}
        return quota is None or len(shared) + sum(r.n_own_blocks for r in running) <= quota

    def _begin_sequence(self, request: Request, running: list[Request]) -> list[Action]:
        """Tell compute, and forget as many kept sequences as the running ones need the room of."""
        submit = request.submit
        if request.shared is not None:
            n_blocks = len(request.shared.blocks)
            submit = replace(submit, prefix_of=request.shared.kept, n_prefix_blocks=n_blocks)
            request.n_done = request.n_cached
        actions: list[Action] = [ToCompute(submit)]
        n_own, quota = sum(r.n_own_blocks for r in running), self._schedule.n_kv_blocks
        while quota is not None and self._prefixes.n_blocks + n_own > quota:
            oldest = self._prefixes.oldest()
            assert oldest is not None, "there was room without any"
            self._prefixes.forget(oldest)
            actions.append(ToCompute(Forget(oldest)))
        return actions

    def _prompt_step(self, *, others_wait: bool) -> Action:
        """The next layers of the chunk. One of several prompts is cut too: so one of them can be
        cancelled soon, without taking the step from the others."""
        if not self._chunk:
            self._chunk, self._chunk_layer = self._next_chunk(), 0
        n_layers = self._schedule.n_layers
        stop_layer = n_layers
        if others_wait or len(self._chunk) > 1:
            stop_layer = min(n_layers, self._chunk_layer + N_LAYERS_BETWEEN_DECODES)
        slices = self._chunk
        if stop_layer == n_layers:
            slices = tuple(replace(part, sample=self._wants_token(part)) for part in slices)
        return self._begin(slices, self._chunk_layer, stop_layer)

    def _next_chunk(self) -> tuple[Slice, ...]:
        """Parts of prompts, in order. That of the first ends at a multiple of the chunk size."""
        room, parts = self._schedule.chunk_tokens, list[Slice]()
        for number, request in self._requests.items():
            if request.phase is not Phase.PROMPT or (parts and request.submit.keep_logits):
                continue
            if not parts:
                room -= request.n_done % room
            n_tokens = min(room, request.n_prompt - request.n_done)
            parts.append(Slice(number, request.n_done, n_tokens, False))
            room -= n_tokens
            if not room or request.submit.keep_logits:
                break
        return tuple(parts)

    def _wants_token(self, part: Slice) -> bool:
        request = self._requests[part.request]
        return part.start + part.n_tokens == request.n_prompt and request.max_tokens > 0

    def _begin(self, slices: tuple[Slice, ...], first_layer: int, stop_layer: int) -> Action:
        self._n_steps += 1
        self._step = Step(self._n_steps, slices, first_layer, stop_layer, self._n_guesses)
        return ToCompute(self._step)

    def check(self) -> None:
        """Invariants; raises AssertionError."""
        for number, request in self._requests.items():
            assert (request.phase is Phase.QUEUED) == (number in self._queue), number
            assert request.n_done <= request.n_prompt + len(request.tokens), number
        quota = self._schedule.n_kv_blocks
        running = [r for r in self._requests.values() if r.phase is not Phase.QUEUED]
        n_own = sum(r.n_own_blocks for r in running)
        assert quota is None or n_own + self._prefixes.n_blocks <= quota
        self._prefixes.check()
        if self._step:
            assert all(part.request in self._requests for part in self._step.slices)
