"""What the composition of steps goes by (see `requests`)."""

from dataclasses import dataclass

N_LAYERS_BETWEEN_DECODES = 4  # of a prompt chunk, while other sequences wait for their next token


@dataclass(frozen=True, slots=True)
class Schedule:
    """What composing needs to know of the model and the budget."""

    n_layers: int
    chunk_tokens: int  # a multiple of 64
    max_running: int = 1  # sequences that may hold KV blocks at once
    n_kv_blocks: int | None = None  # of 64 tokens, for all of them; None: never too few
    keeps_prefixes: bool = False  # blocks of an ended sequence stay until others need the room
