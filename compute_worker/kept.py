"""What `eval` keeps of a prompt: logits of every position and the experts every layer chose."""

from typing import BinaryIO

import numpy as np

from compute_worker.matrix import Floats, Integers


class KeptPrompt:
    """Chunks arrive in order; each layer tells its chosen experts once per chunk."""

    def __init__(self) -> None:
        self._logits: list[Floats] = []
        self._chosen: dict[int, list[Integers]] = {}

    def add_chosen(self, layer: int, chosen: Integers) -> None:
        """Experts (T, A) of one chunk, ids ascending."""
        self._chosen.setdefault(layer, []).append(chosen.copy())

    def add_logits(self, scores: Floats) -> None:
        """Logits (T, V) of one chunk."""
        self._logits.append(scores)

    def write(self, file: BinaryIO) -> None:
        """As npz: `logits` (T, V) float32 and `topk` (layers, T, A) int16."""
        if not self._logits:
            return  # cancelled before the first chunk was done
        topk = np.stack([np.concatenate(chunks) for _, chunks in sorted(self._chosen.items())])
        np.savez(file, logits=np.concatenate(self._logits), topk=topk.astype(np.int16))
