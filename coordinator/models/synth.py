"""`moe-coord synth`: a model with the exact shapes of a real one and random weights.

Speed, bytes and memory are those of the real model; the text is noise. The deviations of embedding,
expert output and all else are chosen so that routing is about as local as in the real models:
neighbouring random tokens share 0.30 to 0.38 of a layer's experts, and the next layer's router
applied one layer early is right for 0.7 to 0.8 (found by simulation at width 512). With equal
deviations everywhere the context drowns the token, all tokens take the same experts, and a small
pool looks perfect. Feed it different tokens: sample at temperature 1 with a seed, or give random
ids; greedy text runs in circles.

The file is written piece by piece, so an 18 GB model needs a few MiB of memory. The same arguments
give the same bytes.
"""

import errno
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from coordinator.command.commands import SynthCommand
from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import format_size
from coordinator.command.terminal import Terminal
from coordinator.models.synth_blocks import random_weights
from coordinator.models.synth_header import SynthTensor, header_bytes, padded, vocabulary_entries
from coordinator.processes.limits import ResourceError
from io_worker.ggml_types import GGML_TYPES, GgmlType

HEAD_WIDTH = 128
CONTEXT_TOKENS = 4096
DEVIATION, EMBEDDING_DEVIATION = 0.02, 0.5
SPARE_BYTES = 64 * 1024 * 1024  # left free on the disk

TYPES: Mapping[str, GgmlType] = {kind.name: kind for kind in GGML_TYPES.values()}
Report = Callable[[int, int], None]  # bytes written, bytes in all
Value = int | float | str


@dataclass(frozen=True, slots=True)
class Shape:
    """What is taken over from a real model."""

    arch: str
    pre_tokenizer: str
    width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_experts: int
    n_active: int
    expert_width: int
    vocabulary_size: int
    rope_base: float
    rms_epsilon: float
    down_deviation: float


SHAPES: Mapping[str, Shape] = {
    "olmoe": Shape(  # OLMoE-1B-7B
        "olmoe", "olmo", 2048, 16, 16, 16, 64, 8, 1024, 50304, 1e4, 1e-5, 0.165
    ),
    "qwen3moe": Shape(  # Qwen3-30B-A3B
        "qwen3moe", "qwen2", 2048, 48, 32, 4, 128, 8, 768, 151936, 1e6, 1e-6, 0.07
    ),
    "qwen3moe-235b": Shape(  # Qwen3-235B-A22B
        "qwen3moe", "qwen2", 4096, 94, 64, 4, 128, 8, 1536, 151936, 1e6, 1e-6, 0.07
    ),
}


@dataclass(frozen=True, slots=True)
class Mix:
    """Types of the weights by their place; `better` is what some layers keep in more bits."""

    base: str
    better: str
    experts: str
    down: str | None  # None: `better` in the better layers, `base` in the others
    output: str
    file_type: int  # general.file_type as llama.cpp numbers it


MIXES: Mapping[str, Mix] = {
    "q4_k_m": Mix("Q4_K", "Q6_K", "Q4_K", None, "Q6_K", 15),
    "q2_k": Mix("Q2_K", "Q3_K", "Q2_K", "Q3_K", "Q6_K", 10),
    "mxfp4": Mix("Q8_0", "Q8_0", "MXFP4", "MXFP4", "Q8_0", 38),
}


@dataclass(frozen=True, slots=True)
class Model:
    """What is to be written."""

    name: str
    shape: Shape
    mix: Mix
    n_layers: int


def run_synth(command: SynthCommand) -> None:
    """Write the file that the command asks for, with progress; raises like `write_model`."""
    # as an exception, so that the unfinished file is removed
    signal.signal(signal.SIGTERM, _terminate)
    shape = SHAPES[command.shape]
    name = f"synthetic-{command.shape}-{command.mix}"
    model = Model(name, shape, MIXES[command.mix], command.layers or shape.n_layers)
    with Terminal() as terminal:
        total = write_model(
            command.out,
            model,
            sparse=command.sparse,
            force=command.force,
            report=lambda done, whole: terminal.progress("writing", done, whole),
        )
        terminal.end_progress()
        hole = ", the weights are a hole" if command.sparse else ""
        terminal.line(f"wrote {command.out}: {format_size(total)}{hole}")


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signal.SIGTERM)


def write_model(out: Path, model: Model, *, sparse: bool, force: bool, report: Report) -> int:
    """Write a model; returns its bytes. With `sparse` all weights are a hole, which reads as 0.

    The file appears under its name only when it is whole. Raises `ConfigError` for a path that
    cannot be used and `ResourceError` for a disk that is full.
    """
    tensors = list(_tensors(model))
    entries, n_entries = vocabulary_entries(model.shape.vocabulary_size, model.shape.pre_tokenizer)
    header = header_bytes(_keys(model), entries, n_entries, tensors)
    total = len(header) + sum(padded(tensor.n_bytes) for tensor in tensors)
    _check_place(out, len(header) if sparse else total, force=force)
    part = out.with_name(out.name + ".part")
    try:
        if force:
            out.unlink(missing_ok=True)
        with part.open("wb") as file:
            file.write(header)
            if sparse:
                file.truncate(total)
            else:
                _write_tensors(file, tensors, total, report)
        part.replace(out)
    except OSError as error:
        text = f"{out}: cannot be written: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ResourceError(f"{text}; expected {format_size(total)} of room") from error
        raise ConfigError(f"{text}; give another path") from error
    finally:
        part.unlink(missing_ok=True)  # there only when something went wrong
    return total


def _check_place(out: Path, needed: int, *, force: bool) -> None:
    if not out.parent.is_dir():
        raise ConfigError(f"OUT: expected a folder {str(out.parent)!a}, found none; make it first")
    if out.exists() and not (force and out.is_file()):
        advice = "--force writes over it" if out.is_file() else "give the name of a file"
        raise ConfigError(f"OUT: expected a new file, found {str(out)!a} there; {advice}")
    freed = out.stat().st_blocks * 512 if out.exists() else 0
    free = shutil.disk_usage(out.parent).free + freed
    if free < needed + SPARE_BYTES:
        raise ResourceError(
            f"{out}: expected {format_size(needed + SPARE_BYTES)} free on its disk, found "
            f"{format_size(free)}; give another path, or fewer --layers"
        )


def _write_tensors(file: BinaryIO, tensors: list[SynthTensor], total: int, report: Report) -> None:
    rng = random.Random(0)
    for tensor in tensors:
        for piece in random_weights(tensor.kind, tensor.n_elements, tensor.deviation, rng):
            file.write(piece)
            report(file.tell(), total)
        file.write(bytes(padded(tensor.n_bytes) - tensor.n_bytes))
    report(total, total)


def _keys(model: Model) -> dict[str, Value]:
    shape = model.shape
    own: dict[str, Value] = {
        "context_length": CONTEXT_TOKENS,
        "embedding_length": shape.width,
        "block_count": model.n_layers,
        "feed_forward_length": shape.expert_width,
        "expert_feed_forward_length": shape.expert_width,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
        "attention.key_length": HEAD_WIDTH,
        "attention.value_length": HEAD_WIDTH,
        "attention.layer_norm_rms_epsilon": shape.rms_epsilon,
        "rope.freq_base": shape.rope_base,
        "expert_count": shape.n_experts,
        "expert_used_count": shape.n_active,
    }
    general: dict[str, Value] = {
        "general.architecture": shape.arch,
        "general.name": model.name,
        "general.file_type": model.mix.file_type,
    }
    return general | {f"{shape.arch}.{key}": value for key, value in own.items()}


def _tensors(model: Model) -> Iterator[SynthTensor]:
    """Every tensor in file order; shapes are innermost first, as (inputs, outputs)."""
    shape, mix, n_layers = model.shape, model.mix, model.n_layers

    def matrix(name: str, kind: str, *dims: int, deviation: float = DEVIATION) -> SynthTensor:
        return SynthTensor(f"{name}.weight", dims, TYPES[kind], deviation)

    def norm(name: str, n: int) -> SynthTensor:
        return SynthTensor(f"{name}.weight", (n,), TYPES["F32"], None)

    width, n_experts, expert_width = shape.width, shape.n_experts, shape.expert_width
    q_width, kv_width = shape.n_heads * HEAD_WIDTH, shape.n_kv_heads * HEAD_WIDTH
    whole = shape.arch == "olmoe"  # its query and key norms go over all heads at once
    vocabulary = (width, shape.vocabulary_size)
    yield matrix("token_embd", mix.base, *vocabulary, deviation=EMBEDDING_DEVIATION)
    for layer in range(n_layers):
        # the layers in which Q4_K_M keeps values and down matrices in more bits
        eighth = n_layers // 8
        is_better = layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
        better = mix.better if is_better else mix.base
        block = f"blk.{layer}."
        yield norm(block + "attn_norm", width)
        yield norm(block + "ffn_norm", width)
        yield norm(block + "attn_q_norm", q_width if whole else HEAD_WIDTH)
        yield norm(block + "attn_k_norm", kv_width if whole else HEAD_WIDTH)
        yield matrix(block + "attn_q", mix.base, width, q_width)
        yield matrix(block + "attn_k", mix.base, width, kv_width)
        yield matrix(block + "attn_v", better, width, kv_width)
        yield matrix(block + "attn_output", mix.base, q_width, width)
        yield matrix(block + "ffn_gate_inp", "F32", width, n_experts)
        yield matrix(block + "ffn_gate_exps", mix.experts, width, expert_width, n_experts)
        yield matrix(block + "ffn_up_exps", mix.experts, width, expert_width, n_experts)
        yield matrix(
            block + "ffn_down_exps", mix.down or better, expert_width, width, n_experts,
            deviation=shape.down_deviation,
        )  # fmt: skip
    yield norm("output_norm", width)
    yield matrix("output", mix.output, *vocabulary)
