"""The layer whose `Need` is being served: what it still waits for. Plain bookkeeping."""

from dataclasses import dataclass, field

from coordinator.placement import Queues
from shm.messages import ExpertUse, Need


@dataclass(slots=True)
class ServedLayer:
    """`missing` experts are being read; those in `takes_over` follow another into its slot."""

    need: Need
    missing: set[int] = field(default_factory=set)
    takes_over: Queues = field(default_factory=dict)
    n_waiting: int = 0  # experts in `takes_over`

    @property
    def is_prompt(self) -> bool:
        """Whether tokens of a prompt are among those that need these experts."""
        return any(use.n_recent_tokens for use in self.need.experts)

    def uses_in_order(self) -> list[ExpertUse]:
        """Those that recent tokens use most come last: they stay longest."""
        return sorted(self.need.experts, key=lambda use: (use.n_recent_tokens, use.expert))
