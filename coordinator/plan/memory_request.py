"""What was asked for of the memory plan (see `budget`)."""

from dataclasses import dataclass

from coordinator.command.sizes import PoolSize


@dataclass(frozen=True, slots=True)
class OnlySequence:
    """The one sequence of a run: most tokens of its prompt, and of prompt and answer."""

    prompt_tokens: int
    all_tokens: int
    keeps_logits: bool = False  # `eval`: of every token of the prompt, on the way to a file


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What was asked for; None is for the plan to choose."""

    memory_bytes: int | None
    pool: PoolSize | None
    context_tokens: int | None
    chunk_tokens: int | None
    kv_type: str
    n_io_workers: int
    n_threads: int  # of all processes: kernels and readers
    single_process: bool = False
    is_shipped_model: bool = False
    only: OnlySequence | None = None  # None: sequences of any length may come
    n_sequences: int = 1  # that may run at once, and share the KV cache
    has_pool: bool = True  # else the page cache has the experts, and is not in the budget
    maps_dense: bool = False  # the page cache has the dense weights
    n_file_mappings: int = 0  # of all model files, in all processes
    has_http: bool = False  # a process that talks to clients
    dequantises: bool = True  # weights become float32, a panel at a time
