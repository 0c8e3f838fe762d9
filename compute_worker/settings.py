"""What the compute worker is told in `Welcome`: the model, and how to run it."""

from dataclasses import dataclass

from compute_worker.arch import ModelSpec
from io_worker.reader import ModelFile
from shm.codec import MessageError, decoder_for, pack, unpack

_TAG = "ComputeSettings"


@dataclass(frozen=True, slots=True)
class LocalReads:
    """The compute process reads slabs itself (``--io-workers 0``). 0 threads: inline."""

    reader: str
    n_threads: int
    drop_cache: bool


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """`kv_kind` is f32, f16 or q8_0; `mlock` auto, require or off; `dense` anonymous or mapped;
    `experts_in` pool, own, or auto: measure which is faster."""

    spec: ModelSpec
    files: tuple[ModelFile, ...]
    kernels: str
    numerics: str
    n_threads: int
    kv_kind: str
    n_kv_blocks: int
    mlock: str
    dense: str
    experts_in: str
    n_tokens: int | None  # of the one answer of the run; None: any may come
    local_reads: LocalReads | None
    polls: bool  # a core is compute's alone: it may keep it awake while it waits
    keep_fd: int | None  # `eval`: where logits and chosen experts of the prompt are written


def encode_settings(settings: ComputeSettings) -> bytes:
    """The settings as they travel in `Welcome`."""
    return pack(_TAG, settings)


def decode_settings(data: bytes) -> ComputeSettings:
    """Undo `encode_settings`; raises `MessageError`."""
    tag, fields = unpack(data)
    if tag != _TAG:
        raise MessageError(f"settings: expected {_TAG}, found {tag!r:.40}")
    settings: ComputeSettings = decoder_for(ComputeSettings)(fields)
    return settings
