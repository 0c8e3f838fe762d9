"""Use counts of experts from an importance matrix, which quantisers make from sample texts.

A GGUF imatrix holds, for each weight of the model, sums of squared inputs (`<name>.in_sum2`) and
how many tokens went into them (`<name>.counts`); for the experts of a layer there is one count per
expert. Source of the layout: tools/imatrix of llama.cpp. The older `.dat` files have one count per
tensor, which says nothing about experts. How an expert's texts were chosen is unknown: the counts
are a beginning, not a forecast.
"""

import math
import struct
from pathlib import Path

from coordinator.command.flag_values import ConfigError
from coordinator.routing.usage import UsageCounts
from io_worker.ggml_types import GGML_TYPES
from io_worker.gguf_header import GgufHeader, ModelFormatError, TensorInfo, read_header

ROLES = ("up", "gate", "down")  # all three have the same counts; some files leave one out
NOT_GGUF = (
    "a file that is no GGUF; the old .dat format counts calls per tensor, not tokens per expert: "
    "make it again with llama-imatrix --output-format gguf"
)


def read_imatrix(path: Path, fresh: UsageCounts) -> UsageCounts:
    """Counts of every expert that the file names. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        if not is_gguf:
            raise _refusal(path, "a GGUF imatrix", NOT_GGUF)
        header = read_header(path)
        with path.open("rb") as file:
            for layer in range(fresh.n_layers):
                tensor = _counts_of(header, layer)
                if tensor is not None:
                    file.seek(tensor.offset)
                    _add(path, fresh, layer, tensor, file.read(4 * fresh.n_experts))
    except OSError as error:
        raise _refusal(path, "a readable file", error.strerror or "an error") from error
    except ModelFormatError as error:
        raise ConfigError(f"--imatrix: {error}; give another file") from error
    if not fresh.counts:
        found = "none for the layers of this model"
        raise _refusal(path, "counts of experts (blk.0.ffn_up_exps.weight.counts)", found)
    return fresh


def _counts_of(header: GgufHeader, layer: int) -> TensorInfo | None:
    names = [f"blk.{layer}.ffn_{role}_exps.weight.counts" for role in ROLES]
    return next((header.tensors[name] for name in names if name in header.tensors), None)


def _add(path: Path, usage: UsageCounts, layer: int, tensor: TensorInfo, data: bytes) -> None:
    n_values = math.prod(tensor.shape)
    kind = GGML_TYPES[tensor.type].name
    if kind != "F32" or n_values != usage.n_experts:
        expected = f"{usage.n_experts} F32 counts in {tensor.name}"
        raise _refusal(path, expected, f"{n_values} of {kind}; it is of another model")
    if len(data) < 4 * n_values:
        raise _refusal(path, "whole tensors", "the end of the file")
    for expert, count in enumerate(struct.unpack(f"<{n_values}f", data)):
        if not 0 <= count < math.inf:
            raise _refusal(path, f"counts of 0 or more in {tensor.name}", f"{count}")
        if count:
            usage.counts[layer, expert] = count


def _refusal(path: Path, expected: str, found: str) -> ConfigError:
    return ConfigError(f"--imatrix: expected {expected} in {str(path)!a:.200}, found {found}")
