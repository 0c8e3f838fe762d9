"""KV blocks of sequences that are over, kept for sequences that begin like them.

A block holds 64 tokens; one that is full is never written again, and what is in it depends on the
tokens up to its end alone. So a new sequence may take over the full blocks of an old one as far as
their tokens are the same, and its answer does not change by a bit.

The compute process holds the blocks, with counts of who uses them; this module decides which stay
and counts them the same way. Blocks have numbers of its own. Pure: it reads no clock; "least
recently used" is by the order of `take` and `keep`.
"""

from collections import Counter
from dataclasses import dataclass

from compute_worker.arch import KV_BLOCK_TOKENS

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """What a sequence takes over: the first blocks of a kept sequence."""

    kept: int  # number of the sequence that is over
    blocks: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens that need not be computed."""
        return len(self.blocks) * KV_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class _Kept:
    tokens: Tokens  # of the full blocks
    blocks: tuple[int, ...]


class KeptPrefixes:
    """All kept sequences, least recently used first."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._users: Counter[int] = Counter()  # of each block: kept and running sequences
        self._n_numbered = 0

    @property
    def n_blocks(self) -> int:
        """Blocks in use by kept sequences and, shared, by running ones."""
        return len(self._users)

    def take(self, prompt: Tokens) -> Shared | None:
        """The longest kept beginning of a prompt, now used by one more. `drop_user` gives it back.

        The last token of a prompt is always computed: what follows it is drawn from its scores.
        """
        best, n_best = None, 0
        for number, kept in self._kept.items():
            n = n_common_blocks(kept.tokens, prompt[:-1])
            if n >= n_best and n > 0:  # of equals the last one used
                best, n_best = number, n
        if best is None:
            return None
        kept = self._kept.pop(best)
        self._kept[best] = kept  # used just now
        shared = Shared(best, kept.blocks[:n_best])
        self._users.update(shared.blocks)
        return shared

    def drop_user(self, shared: Shared | None) -> None:
        """A sequence that took these blocks is over."""
        if shared is not None:
            self._release(shared.blocks)

    def keep(self, number: int, tokens: Tokens, shared: Shared | None) -> tuple[int, list[int]]:
        """A sequence is over; `tokens` are all that its blocks hold. Its full blocks stay.

        Returns how many of its blocks stay, none where another has all of them, and the kept
        sequences that it makes superfluous: compute must forget them. Call before `drop_user`.
        """
        n_full = len(tokens) // KV_BLOCK_TOKENS
        tokens = tokens[: n_full * KV_BLOCK_TOKENS]
        if any(kept.tokens[: len(tokens)] == tokens for kept in self._kept.values()) or not n_full:
            return 0, []
        superfluous = [
            other for other, kept in self._kept.items() if tokens[: len(kept.tokens)] == kept.tokens
        ]
        taken = shared.blocks[:n_full] if shared is not None else ()
        n_new = n_full - len(taken)
        blocks = (*taken, *range(self._n_numbered, self._n_numbered + n_new))
        self._n_numbered += n_new
        self._kept[number] = _Kept(tokens, blocks)
        self._users.update(blocks)
        for other in superfluous:
            self.forget(other)
        return n_full, superfluous

    def sequences(self) -> dict[int, Tokens]:
        """All kept ones, least recently used first: number and tokens."""
        return {number: kept.tokens for number, kept in self._kept.items()}

    def oldest(self) -> int | None:
        """The kept sequence to forget first."""
        return next(iter(self._kept), None)

    def forget(self, number: int) -> None:
        """A kept sequence gives up its blocks."""
        self._release(self._kept.pop(number).blocks)

    def clear(self) -> None:
        """The compute process is dead, and all blocks with it."""
        self._kept.clear()
        self._users.clear()

    def check(self) -> None:
        """Invariants; raises AssertionError."""
        assert all(n > 0 for n in self._users.values())
        for kept in self._kept.values():
            assert len(kept.tokens) == len(kept.blocks) * KV_BLOCK_TOKENS
            assert all(self._users[block] > 0 for block in kept.blocks)

    def _release(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]


def n_common_blocks(kept: Tokens, prompt: Tokens) -> int:
    """Full blocks whose tokens, and all before them, are the same."""
    n = 0
    while (n + 1) * KV_BLOCK_TOKENS <= min(len(kept), len(prompt)) and kept[
        n * KV_BLOCK_TOKENS : (n + 1) * KV_BLOCK_TOKENS
    ] == prompt[n * KV_BLOCK_TOKENS : (n + 1) * KV_BLOCK_TOKENS]:
        n += 1
    return n
