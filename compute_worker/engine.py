"""The compute worker's state: sequences, their KV blocks, and the step that runs.

It executes the steps that the coordinator composed and answers each with what was drawn and where
the time went. Between two layers it looks for `Cancel`. It knows token ids only, decides nothing
about slots, and touches no socket (see `link`).
"""

import contextlib
import resource
import time
from dataclasses import dataclass, field

import numpy as np

from compute_worker.feed import ExpertFeed, StepCancelled
from compute_worker.forward import Batch, Experts, Known, embed, forward, logits
from compute_worker.kept import KEPT_ROWS, KeptFileError, KeptPrompt
from compute_worker.kernels import Kernels
from compute_worker.kv import KvCache, n_blocks_needed
from compute_worker.kv_file import read_blocks, write_blocks
from compute_worker.link import Link
from compute_worker.matrix import Floats, Integers
from compute_worker.sampling import SequenceSampler, top_logprobs
from compute_worker.step_rows import drawn_rows, recent_rows
from compute_worker.weights import Weights
from io_worker.reader import ReadError
from shm.messages import (
    BlocksSaved,
    Finished,
    Forget,
    LoadBlocks,
    Progress,
    Sampled,
    SaveBlocks,
    Slice,
    Step,
    StepDone,
    StepTimes,
    Submit,
)

PROGRESS_SECONDS = 0.2


@dataclass(slots=True)
class Sequence:
    """One sequence. `tokens` are those of the prompt and those drawn; `blocks` hold its KV."""

    submit: Submit
    sampler: SequenceSampler
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    kept: KeptPrompt | None = None


class Engine:
    """Executes `Step` over the sequences that `Submit` began."""

    def __init__(
        self,
        weights: Weights,
        kernels: Kernels,
        kv: KvCache,
        feed: ExpertFeed,
        link: Link,
        keep_fd: int | None = None,
    ) -> None:
        self._weights = weights
        self._kernels = kernels
        self._kv = kv
        self._feed = feed
        self._link = link
        self._keep_fd = keep_fd  # where a sequence with `keep_logits` is written
        self._next_progress = 0.0
        self._drawn: list[int] = []  # tokens of the last step
        self._sequences: dict[int, Sequence] = {}
        self._prefixes: dict[int, list[int]] = {}  # blocks kept of sequences that are over
        self._partial: dict[tuple[Slice, ...], Floats] = {}  # hidden state of a cut prompt chunk

    def submit(self, submit: Submit) -> None:
        """Begin a sequence; nothing is computed yet."""
        kept = None
        if submit.keep_logits and self._keep_fd is not None:
            kept = KeptPrompt(self._keep_fd, self._weights.spec, len(submit.prompt))
        sampler = SequenceSampler(submit.sampling, submit.prompt)
        blocks = []
        if submit.prefix_of is not None:
            blocks = self._prefixes[submit.prefix_of][: submit.n_prefix_blocks]
        for block in blocks:
            self._kv.share(block)
        self._sequences[submit.request] = Sequence(
            submit, sampler, list(submit.prompt), blocks, kept
        )

    def finish(self, finished: Finished) -> None:
        """Forget a sequence and free its KV blocks, but for those that are to be kept."""
        request, n_kept = finished.request, finished.n_kept_blocks
        self._feed.endings.forget(request)
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return
        if n_kept:
            self._prefixes[request] = sequence.blocks[:n_kept]
        for block in sequence.blocks[n_kept:]:
            self._kv.free(block)
        self._leave_chunk(request)
        if sequence.kept is not None:
            sequence.kept.close()

    def _leave_chunk(self, request: int) -> None:
        """Its rows of a cut chunk go; those of others stay."""
        for key in [key for key in self._partial if any(part.request == request for part in key)]:
            hidden = self._partial.pop(key)
            left = tuple(part for part in key if part.request != request)
            if left:
                stays = [np.full(part.n_tokens, part.request != request) for part in key]
                self._partial[left] = hidden[np.concatenate(stays)]

    def forget(self, forget: Forget) -> None:
        """Free the KV blocks that were kept of an ended sequence."""
        for block in self._prefixes.pop(forget.request, ()):
            self._kv.free(block)

    def load(self, load: LoadBlocks) -> None:
        """Take over blocks from a file. Raises `OSError`, `KvFileError`."""
        self._prefixes[load.request] = read_blocks(load.fd, load.offset, self._kv, load.n_blocks)

    def save(self, save: SaveBlocks) -> BlocksSaved:
        """Write kept blocks to a file."""
        try:
            write_blocks(save.fd, save.offset, self._kv, self._prefixes[save.request])
        except OSError as error:
            return BlocksSaved(save.request, error.strerror)
        return BlocksSaved(save.request, None)

    def step(self, step: Step) -> StepDone:
        """Execute one step. A cancelled step leaves the KV of finished tokens as it was, and so
        does one whose embedding rows cannot be read, or what is kept of it not written."""
        started_ns = time.monotonic_ns()
        faults = _faults()
        is_kept = self._sequences[step.slices[0].request].kept is not None
        wanted = None if is_kept else drawn_rows(step.slices)
        recent = recent_rows(step.slices, self._n_prompt_tokens)
        self._feed.begin_step(step.step, recent, wanted, step.n_guesses)
        sampled: tuple[Sampled, ...] = ()
        cancelled, failure = False, None
        try:
            sampled = self._run(step, wanted)
        except StepCancelled:
            cancelled = True
        except (ReadError, KeptFileError) as error:
            cancelled, failure = True, str(error)
        self._drawn = [drawn.token for drawn in sampled]
        self._feed.end_step(early=cancelled)
        self._kernels.park()
        wall_ns = time.monotonic_ns() - started_ns
        waiting = self._feed.waiting
        major, minor = (now - then for now, then in zip(_faults(), faults, strict=True))
        times = StepTimes(
            wall_ns,
            max(0, wall_ns - waiting.disk_ns - waiting.coordination_ns),
            waiting.disk_ns,
            waiting.coordination_ns,
            major,
            minor,
            self._feed.computing_ns,
        )
        released = self._feed.take_released()
        for late in self._feed.endings.take_late():
            if isinstance(late, Finished):
                self.finish(late)
            else:
                self.forget(late)
        uses, earlier = self._feed.standing_uses, self._feed.take_earlier()
        return StepDone(step.step, sampled, times, uses, released, cancelled, earlier, failure)

    def _n_prompt_tokens(self, request: int) -> int:
        return len(self._sequences[request].submit.prompt)

    def _run(self, step: Step, wanted: Integers | None) -> tuple[Sampled, ...]:
        batch = self._batch(step)
        if step.first_layer == 0:
            hidden = embed(self._weights, batch)  # (T, D)
        else:
            hidden = self._partial.pop(_key(step))

        def before(layer: int) -> None:
            self._look_for_cancel(step)
            self._tell_progress(step, layer)

        given = (batch, hidden, range(step.first_layer, step.stop_layer), self._kv)
        experts = self._experts(step)
        hidden = forward(self._weights, *given, *experts, self._kernels, wanted, before)
        if step.stop_layer < self._weights.spec.n_layers:
            self._partial[_key(step)] = hidden
            return ()
        return self._sample(step, hidden)

    def look_ahead(self) -> None:
        """Have the embedding rows of what was drawn before the next step asks for them."""
        if self._drawn:
            with contextlib.suppress(ReadError):  # the step that asks for them says so, if any does
                self._weights.embedding.look_ahead(np.array(self._drawn, np.int32))

    def _tell_progress(self, step: Step, layer: int) -> None:
        """A long prompt: which part of it is done, in tokens times layers, a few times a second."""
        part = step.slices[0]
        n_prompt = len(self._sequences[part.request].submit.prompt)
        now = time.monotonic()
        if part.start >= n_prompt or now < self._next_progress:
            return
        self._next_progress = now + PROGRESS_SECONDS
        n_layers = self._weights.spec.n_layers
        done = part.start * n_layers + part.n_tokens * layer
        self._link.send(Progress("prompt", done, n_prompt * n_layers))

    def _experts(self, step: Step) -> tuple[Experts, Known | None]:
        """Who has the experts of a step, and what is known of them without asking. What is to be
        kept must be seen."""
        kept = self._sequences[step.slices[0].request].kept
        if kept is None:
            return self._feed, self._feed

        def keep_and_feed(layer: int, x: Floats, chosen: Integers, weights: Floats) -> Floats:
            kept.add_chosen(layer, chosen)
            return self._feed(layer, x, chosen, weights)

        return keep_and_feed, None

    def _batch(self, step: Step) -> Batch:
        """Token ids, positions and block tables of the slices; allocates the blocks they need."""
        tokens: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        for index, part in enumerate(step.slices):
            sequence = self._sequences[part.request]
            stop = part.start + part.n_tokens
            while len(sequence.blocks) < n_blocks_needed(stop):
                sequence.blocks.append(self._kv.allocate())
            tokens += sequence.tokens[part.start : stop]
            positions += range(part.start, stop)
            owners += [index] * part.n_tokens
        blocks = [self._sequences[part.request].blocks for part in step.slices]
        tables = np.zeros((len(blocks), max(map(len, blocks))), np.int32)  # (S, max_blocks)
        for index, own in enumerate(blocks):
            tables[index, : len(own)] = own
        return Batch(
            np.array(tokens, np.int32),
            np.array(positions, np.int32),
            np.array(owners, np.int32),
            tables,
        )

    def _look_for_cancel(self, step: Step) -> None:
        while (message := self._link.poll()) is not None:
            self._feed.note(message)
        cancelled = [part for part in step.slices if self._feed.endings.is_cancelled(part.request)]
        if cancelled:
            raise StepCancelled

    def _sample(self, step: Step, hidden: Floats) -> tuple[Sampled, ...]:
        """Draw the next token of every slice that asks for one."""
        last = np.cumsum([part.n_tokens for part in step.slices]) - 1
        kept = self._sequences[step.slices[0].request].kept
        if kept is not None and not kept.is_whole:
            for start in range(0, len(hidden), KEPT_ROWS):
                rows = hidden[start : start + KEPT_ROWS]
                kept.add_logits(logits(self._weights, rows, self._kernels))
        wanted = [(part, row) for part, row in zip(step.slices, last, strict=True) if part.sample]
        if not wanted:
            return ()
        scores = logits(self._weights, hidden[[row for _, row in wanted]], self._kernels)  # (n, V)
        drawn = []
        for (part, _), row_scores in zip(wanted, scores, strict=True):
            sequence = self._sequences[part.request]
            token, logprob = sequence.sampler.sample(row_scores)
            sequence.tokens.append(token)
            top = top_logprobs(row_scores, sequence.submit.n_top_logprobs)
            drawn.append(Sampled(part.request, token, logprob, top))
        return tuple(drawn)


def _key(step: Step) -> tuple[Slice, ...]:
    """Names a cut chunk: its parts differ only in whether they sample."""
    return tuple(Slice(part.request, part.start, part.n_tokens, False) for part in step.slices)


def _faults() -> tuple[int, int]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt, usage.ru_minflt
