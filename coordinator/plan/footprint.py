"""What the parts of a run take in memory beside weights and pool, as measured.

`tests/memory_samples.py` shows for a whole run what each process has. Functions of their arguments;
who gets how much of the budget is decided in `budget`.
"""

import math

from compute_worker.arch import ModelSpec, dense_bytes, float_tensors

MiB = 1024 * 1024
# RssAnon + VmPTE of each process with its libraries imported and nothing loaded (Python 3.11,
# x86_64): 31 MiB with pyzmq, msgpack, rich, psutil, tokenizers and prometheus-client, and 4 MiB
# more once rich has shown progress; 20 MiB with pyzmq, numpy and gguf, and 4 MiB of embedding rows
# and their buffer; 11 MiB with pyzmq alone. The rest is room for their growth.
COORDINATOR_BYTES = 36 * MiB
COMPUTE_BYTES = 28 * MiB
IO_WORKER_BYTES = 12 * MiB
# 28 MiB with starlette, uvicorn and tokenizers, 12 MiB of the process that renders chat templates;
# the rest is for connections
HTTP_BYTES = 48 * MiB
THREAD_BYTES = MiB // 4  # the touched part of a stack, and its allocator's arena
# A tokenizer, once what its building took is given back: 35 MiB with 152 k tokens and as many
# merges, 29 MiB with the tokens alone, 14 MiB with 50 k of each. The building takes 298 bytes per
# entry and the reading of a text more: in the service beside all else, in a run before it.
TOKEN_BYTES, MERGE_BYTES = 230, 100
SERVICE_ENTRY_BYTES = 380

ATTENTION_TOKENS = 256  # as in `compute_worker.forward`, which the coordinator cannot import
KEPT_ROWS = 32  # as in `compute_worker.kept`
SAMPLING_ROWS = 8  # float32 rows of the vocabulary: scores, probabilities, orders, copies
PANEL_BYTES = 16 * MiB  # to turn 4 MiB of rows into float32, the reference kernels take so much
PAGE_TABLE_SHARE = 512  # 8 bytes per 4 KiB page, in every process that maps it


def processes_bytes(
    spec: ModelSpec,
    n_io_workers: int,
    n_threads: int,
    *,
    single_process: bool,
    has_http: bool = False,
) -> int:
    """Interpreters, libraries and tokenizer; `n_threads` are those of all processes."""
    vocabulary = spec.vocabulary_size * TOKEN_BYTES + spec.n_merges * MERGE_BYTES
    if has_http:
        vocabulary = (spec.vocabulary_size + spec.n_merges) * SERVICE_ENTRY_BYTES
    threads = n_threads * THREAD_BYTES
    if single_process:  # one interpreter with the libraries of both
        return max(COORDINATOR_BYTES, COMPUTE_BYTES) + COMPUTE_BYTES // 2 + threads + vocabulary
    workers = n_io_workers * IO_WORKER_BYTES + (HTTP_BYTES if has_http else 0)
    return COORDINATOR_BYTES + COMPUTE_BYTES + workers + threads + vocabulary


def scratch_bytes(
    spec: ModelSpec, chunk_tokens: int, n_sequences: int = 1, *, dequantises: bool = True
) -> int:
    """The arrays of a prompt chunk of T tokens, and of the sampling of a token of each sequence.

    Experts: what each gave per token, the hidden state, its normed copy, and a copy in 8 bits, so
    4·T·(A+3)·D. Attention takes fewer tokens at a time, and the allocator keeps what it used.
    """
    width, queries = spec.width, spec.n_heads * spec.head_width
    keys = spec.n_kv_heads * spec.head_width
    experts = 4 * chunk_tokens * (spec.n_active + 3) * width
    rows = min(chunk_tokens, ATTENTION_TOKENS)
    n_rows = SAMPLING_ROWS + n_sequences - 1  # only the scores are there for all at once
    attention = 4 * rows * (2 * width + 4 * queries + 2 * keys)
    panel = PANEL_BYTES if dequantises else 0
    return experts + attention + panel + n_rows * 4 * spec.vocabulary_size


def kept_bytes(spec: ModelSpec, n_tokens: int) -> int:
    """What `eval` holds of a prompt: logits on their way to the file, and the chosen experts, as
    int16, until its end."""
    chosen = 2 * spec.n_layers * spec.n_active * n_tokens
    return 4 * min(n_tokens, KEPT_ROWS) * spec.vocabulary_size + chosen


def float_bytes(spec: ModelSpec) -> int:
    """Dense weights that are held as float32 wherever the others lie: norms and routers."""
    return sum(4 * math.prod(info.shape) for info in float_tensors(spec))


def mapped_bytes(spec: ModelSpec, has_pool: bool) -> int:
    """Of the model files where they are mapped: what is used of them has page tables."""
    return dense_bytes(spec) + (0 if has_pool else spec.slabs.total_bytes)


def table_bytes(n_bytes: int, n_mappings: int = 1) -> int:
    """Page tables of memory that so many processes map."""
    return -(-n_bytes * n_mappings // PAGE_TABLE_SHARE)


def with_tables(n_bytes: int, n_mappings: int = 1) -> int:
    """Memory together with its page tables."""
    return n_bytes + table_bytes(n_bytes, n_mappings)


def without_tables(room: int, n_mappings: int) -> int:
    """The most bytes that fit a room together with their page tables."""
    return max(0, room) * PAGE_TABLE_SHARE // (PAGE_TABLE_SHARE + n_mappings)
