"""One request of the decision core, from the queue to its end."""

import enum
from dataclasses import dataclass, field

from compute_worker.arch import KV_BLOCK_TOKENS
from coordinator.core.prefixes import Shared
from shm.messages import Submit


@dataclass(frozen=True, slots=True)
class Restore:
    """KV blocks of a sequence lie in a file, open as `fd`, from `offset` on. `number` is one that
    no request has."""

    number: int
    tokens: tuple[int, ...]
    fd: int
    offset: int


class Phase(enum.Enum):
    """Where a request stands."""

    QUEUED = "queued"
    PROMPT = "prompt"
    DECODE = "decode"


@dataclass(slots=True)
class Request:
    """One request. `n_done` tokens of prompt + answer are in the KV cache."""

    submit: Submit
    max_tokens: int
    stop_ids: frozenset[int]
    phase: Phase = Phase.QUEUED
    n_done: int = 0
    tokens: list[int] = field(default_factory=list)
    shared: Shared | None = None  # what it took over from a sequence that is over

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.submit.prompt)

    @property
    def n_kv_blocks(self) -> int:
        """KV blocks that it can come to need. The last token drawn is never stored."""
        longest = min(self.submit.n_context, self.n_prompt + self.max_tokens - 1)
        return -(-max(self.n_prompt, longest) // KV_BLOCK_TOKENS)

    @property
    def n_own_blocks(self) -> int:
        """Those of them that nobody else has."""
        return self.n_kv_blocks - (len(self.shared.blocks) if self.shared else 0)

    @property
    def n_cached(self) -> int:
        """Tokens of the prompt that need not be computed."""
        return self.shared.n_tokens if self.shared else 0
