"""Keys and tensors of a hostile file, looked up with limits: what is returned can be trusted.

Every refusal is a `ModelFormatError` that names the key or tensor, what was expected and what was
found. This module knows no architecture: names, limits and shapes are told to it.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from io_worker.ggml_types import GGML_TYPES
from io_worker.gguf_header import ModelFormatError, TensorInfo
from io_worker.model_file import Model


def shown(found: object) -> str:
    """A value of a hostile file in an error: short, printable, one line."""
    return "nothing" if found is None else reprlib.repr(found)


@dataclass(frozen=True, slots=True)
class Keys:
    """Reads the keys of one architecture, with limits."""

    path: str
    arch: str
    metadata: Mapping[str, Any]

    def error(self, key: str, expected: str, found: object) -> ModelFormatError:
        """The refusal of one key."""
        text = f"expected {expected}, found {shown(found)}"
        return ModelFormatError(self.path, f"{self.arch}.{key}", text)

    def get(self, key: str) -> Any:
        """The value as it is in the file, None where the key is absent."""
        return self.metadata.get(f"{self.arch}.{key}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in low..high; without a default the key must be there."""
        found = self.get(key)
        value = default if found is None else found
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"an integer {low}..{high}", found)
        return value

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A float in low..high; without a default the key must be there."""
        found = self.get(key)
        value = default if found is None else found
        if type(value) is not float or not low <= value <= high:  # NaN fails both comparisons
            raise self.error(key, f"a number {low:g}..{high:g}", found)
        return value


class Tensors:
    """Looks tensors up by name, with shape and type, and knows which nobody asked for."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._unclaimed = set(model.tensors)

    def find(self, name: str, shape: tuple[int, ...], types: frozenset[str]) -> TensorInfo:
        """The tensor of this name, of exactly this shape and one of these types."""
        info = self._model.tensors.get(name)
        if info is None:
            text = f"expected a tensor of shape {list(shape)}, found none"
            raise ModelFormatError(self._model.paths[0], name, text)
        if info.shape != shape:
            if len(info.shape) == len(shape) == 3 and info.shape[:2] == shape[:2]:
                raise self.error(info, f"expected {shape[2]} experts, found {info.shape[2]}")
            raise self.error(info, f"expected shape {list(shape)}, found {list(info.shape)}")
        type_name = GGML_TYPES[info.type].name
        if type_name not in types:
            expected = ", ".join(sorted(types)) if len(types) <= 3 else "one of weights"
            raise self.error(info, f"expected type {expected}, found {type_name}")
        self._unclaimed.discard(name)
        return info

    def refuse_rest(self, what: str) -> None:
        """A tensor that nobody asked for would be ignored; `what` is the model, for the message."""
        if self._unclaimed:
            info = self._model.tensors[min(self._unclaimed)]
            raise self.error(info, f"expected no such tensor in {what}, found {list(info.shape)}")

    def error(self, info: TensorInfo, text: str) -> ModelFormatError:
        """The refusal of one tensor."""
        return ModelFormatError(self._model.paths[info.file], info.name, text)
