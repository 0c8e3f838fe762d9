"""Guesses which experts the next layer will need, and judges whether acting on it pays.

Pure: events in, keys out. Every guess is scored against what the layer then needed, also while
nothing is read on it (shadow). Acting on guesses has to prove itself now and then: blocks of steps
with and without it alternate, time per step is compared pair by pair, and prefetch goes to sleep
when it does not get faster. Public measurements with a busy disk lost 4 to 21 % although 70 to 89 %
of the guesses were right, and gained 34 to 73 % where the disk idled: only the clock can tell.
Before the first comparison it acts only where compute seldom waits for the disk.

A long prompt needs no judge: its tokens use nearly all experts of every layer, so what is read of
the next layer while attention runs would be read a moment later anyway (`ahead`). Mode "prompt" is
that alone.

Rule to keep: a guess never changes a result, only which experts are resident.
"""

import enum
from collections import deque
from dataclasses import dataclass
from statistics import median

from coordinator.core.policies import Key
from shm.messages import Need

MODES = ("off", "prompt", "previous-token", "router")
# Per layer, the likeliest of what its router would choose one layer early. Of those that are not
# resident the first five were right 6 times in 10, the three after them 3 times (OLMoE's shapes).
MAX_GUESSES = 5
# of a prompt's tokens per expert: the next layer then needs nearly all of its experts, too
MIN_TOKENS_PER_EXPERT = 8
BLOCK_STEPS = 4
N_PAIRS = 6  # compared before a verdict, unless fewer agree
N_CLEAR_PAIRS = 2  # a short answer is over before six
CLEAR_GAIN = 0.05  # of the time per step, in every pair: no need to compare more
MIN_GAIN = 0.01  # of the time per step, else it is not worth its wear
UNTRIED_STEPS = 64  # before the first trial: a short answer should not pay for a comparison
SLEEP_STEPS = 256  # before a new trial
RECHECK_STEPS = 512  # while on, before it has to prove itself again
# Until then guesses are read once compute waits for the disk for less than a share of its time, and
# not any more above a larger one. OLMoE's shapes on a disk of 2 GB/s: they gained up to 12 % with
# 3000 MiB, where compute waits 0.31 to 0.39 without them and 0.21 to 0.32 with them, and nothing
# with 2000 (0.44 to 0.51), 1500 (0.57) and 800 (0.70); on one of 150 MB/s they lost 7 to 14 %.
BUSY_SHARE, IDLE_SHARE = 0.5, 0.42
BUSY_STEPS = 8  # that the share is of, all of one mode


class Phase(enum.Enum):
    """What prefetch does now."""

    OFF = "off"  # asked for: shadow only; a long prompt may still read ahead
    TRIAL = "trial"
    ON = "on"
    BUSY = "busy"  # not tried yet: the disk has little time for guesses, as far as is known
    ASLEEP = "asleep"  # it did not pay lately


@dataclass(slots=True)
class PrefetchCounters:
    """Totals. Accuracy = right / guessed, of the likeliest as many as the layer uses."""

    guessed: int = 0
    right: int = 0
    issued: int = 0
    used: int = 0
    wasted: int = 0
    trials: int = 0
    gained_ns: int = 0  # over all trials: time off less time on; negative is a loss
    wakes: int = 0


class Prefetch:
    """State of the guesses and of the comparison."""

    def __init__(self, mode: str) -> None:
        self.counters = PrefetchCounters()
        self.phase = Phase.OFF if mode in ("off", "prompt") else Phase.BUSY
        self._mode = mode
        self._last: dict[int, tuple[int, ...]] = {}  # experts of each layer in the step before
        self._guess: tuple[int, tuple[int, ...]] | None = None  # layer, experts likeliest first
        self._ahead: tuple[Key, ...] = ()  # of the layer after one of a prompt
        self._loaded: set[Key] = set()  # read on a guess, not used yet
        # of the current block, sleep or spell of work
        self._steps = RECHECK_STEPS - UNTRIED_STEPS
        self._block: deque[int] = deque(maxlen=BLOCK_STEPS)
        self._blocks: list[tuple[bool, int]] = []  # (acting, median ns of its steps)
        self._acting_block = False
        self._waits: deque[tuple[int, int]] = deque(maxlen=BUSY_STEPS)  # ns waited, of a step's ns

    @property
    def may_act(self) -> bool:
        """Whether it was asked for, if only for prompts."""
        return self._mode != "off"

    @property
    def is_acting(self) -> bool:
        """Whether guesses may be read now."""
        return self.phase is Phase.ON or (self.phase is Phase.TRIAL and self._acting_block)

    @property
    def n_wanted(self) -> int:
        """Guesses of the next layer's router that compute should tell with each layer."""
        return MAX_GUESSES if self._mode == "router" and self.is_acting else 0

    def handle_guess(self, layer: int, experts: tuple[int, ...]) -> None:
        """The layer at hand needs nothing; of the next one these are probably missing."""
        self._guess = (layer, experts)

    def handle_need(self, need: Need, next_layer: int | None) -> None:
        """Score the guess for this layer, make one for the next."""
        used = tuple(use.expert for use in need.experts)
        self._score(need.layer, used)
        self._guess = None
        is_decode = not any(use.n_recent_tokens for use in need.experts)
        if next_layer is not None and is_decode:
            last = self._last.get(next_layer, ())
            of_router = () if self._mode == "previous-token" else need.predicted
            guess = of_router if of_router or self._mode == "router" else last
            self._guess = (next_layer, guess[: len(used)])
        n_tokens = sum(use.n_tokens for use in need.experts)
        is_long = not is_decode and n_tokens >= MIN_TOKENS_PER_EXPERT * len(used)
        self._ahead = ()
        if self._mode != "off" and next_layer is not None and is_long:
            self._ahead = tuple([(next_layer, expert) for expert in used])
        self._last[need.layer] = used

    @property
    def unused(self) -> frozenset[Key]:
        """Guesses that were read, or are being read, and that nothing used yet."""
        return frozenset(self._loaded)

    def wanted(self) -> list[Key]:
        """Keys worth reading now, likeliest first; empty unless it is acting."""
        if not self.is_acting or self._guess is None:
            return []
        layer, experts = self._guess
        return [(layer, expert) for expert in experts[:MAX_GUESSES]]

    def ahead(self) -> tuple[Key, ...]:
        """Keys that the next layer of a prompt needs, all but certainly."""
        return self._ahead

    def note_issued(self, key: Key) -> None:
        """A guess is being read."""
        self.counters.issued += 1
        self._loaded.add(key)

    def note_evicted(self, keys: list[Key]) -> None:
        """Resident experts went: those that were guesses and that nobody used were wasted."""
        wasted = self._loaded.intersection(keys)
        self._loaded -= wasted
        self.counters.wasted += len(wasted)

    def handle_step(self, wall_ns: int, wait_disk_ns: int) -> None:
        """A decode step took this long, and waited so long for the disk: feed the comparison."""
        if self.phase is Phase.OFF:
            return
        self._waits.append((wait_disk_ns, wall_ns))
        self._steps += 1
        if self.phase is Phase.TRIAL:
            self._trial_step(wall_ns)
        elif self._steps >= (SLEEP_STEPS if self.phase is Phase.ASLEEP else RECHECK_STEPS):
            self._begin_trial()
        elif not self.counters.trials and len(self._waits) == BUSY_STEPS:
            self._presume()

    def _presume(self) -> None:
        """Nothing has been compared yet: go by what the disk seems to have time for."""
        waited_ns, wall_ns = (sum(each) for each in zip(*self._waits, strict=True))
        phase = self.phase
        if phase is Phase.ON and waited_ns > BUSY_SHARE * wall_ns:
            self.phase = Phase.BUSY
        elif phase is Phase.BUSY and waited_ns < IDLE_SHARE * wall_ns:
            self.phase = Phase.ON
        if self.phase is not phase:
            self._waits.clear()

    def _score(self, layer: int, used: tuple[int, ...]) -> None:
        if self._guess is not None and self._guess[0] == layer:
            guess = self._guess[1]
            self.counters.guessed += len(guess)
            self.counters.right += len(set(guess) & set(used))
        hits = {(layer, expert) for expert in used} & self._loaded
        self.counters.used += len(hits)
        self._loaded -= hits

    def _begin_trial(self) -> None:
        self.phase = Phase.TRIAL
        self.counters.wakes += 1
        self._steps = 0
        self._blocks.clear()
        self._block.clear()
        self._acting_block = False

    def _trial_step(self, wall_ns: int) -> None:
        self._block.append(wall_ns)
        if self._steps < BLOCK_STEPS:
            return
        # the first step of a block still shows the mode before it
        self._blocks.append((self._acting_block, int(median(list(self._block)[1:]))))
        self._block.clear()
        self._steps = 0
        # A B B A: a drift of the machine's speed falls on both alike
        self._acting_block = len(self._blocks) % 4 in (1, 2)
        if len(self._blocks) % 4 == 0:
            self._judge()

    def _judge(self) -> None:
        on = [ns for acting, ns in self._blocks if acting]
        off = [ns for acting, ns in self._blocks if not acting]
        gains = [1 - a / max(1, b) for a, b in zip(on, off, strict=True)]
        if len(gains) < N_PAIRS and not _is_clear(gains):
            return
        self.counters.trials += 1
        self.counters.gained_ns += (sum(off) - sum(on)) * BLOCK_STEPS
        self.phase = Phase.ON if median(gains) >= MIN_GAIN else Phase.ASLEEP
        self._steps = 0
        self._blocks.clear()


def _is_clear(gains: list[float]) -> bool:
    """Whether all pairs say the same, and loudly."""
    return len(gains) >= N_CLEAR_PAIRS and (min(gains) > CLEAR_GAIN or max(gains) < -CLEAR_GAIN)
