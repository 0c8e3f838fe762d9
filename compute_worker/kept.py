"""What `eval` keeps of a prompt: logits of every position and the experts every layer chose.

An .npz file, `logits` (T, V) float32 and `topk` (layers, T, A) int16. Logits are hundreds of
kilobytes per token, so they go to the file as they come: how many there will be is known before.
"""

import contextlib
import os
import zipfile

import numpy as np

from compute_worker.arch import ModelSpec
from compute_worker.matrix import Floats, Integers

KEPT_ROWS = 32  # logits of so many tokens are made at once


class KeptFileError(Exception):
    """The file cannot be written; one line."""


class KeptPrompt:
    """Chunks arrive in order; each layer tells its chosen experts once per chunk, before their
    logits. What comes after the prompt is not kept. The descriptor stays the caller's."""

    def __init__(self, fd: int, spec: ModelSpec, n_tokens: int) -> None:
        self._fd = fd
        self._n_tokens = n_tokens
        self._n_done = 0
        self._is_written = False
        self._n_chosen = [0] * spec.n_layers
        self._chosen = np.zeros((spec.n_layers, n_tokens, spec.n_active), np.int16)
        self._file = os.fdopen(os.dup(fd), "wb")
        self._archive = zipfile.ZipFile(self._file, "w")
        self._logits = self._archive.open("logits.npy", "w", force_zip64=True)
        shape = (n_tokens, spec.vocabulary_size)
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._logits, header)

    @property
    def is_whole(self) -> bool:
        """Whether all of the prompt is in the file."""
        return self._n_done == self._n_tokens

    def add_chosen(self, layer: int, chosen: Integers) -> None:
        """Experts (T, A) of one chunk, ids ascending."""
        start = self._n_chosen[layer]
        rows = self._chosen[layer, start : start + len(chosen)]
        rows[:] = chosen[: len(rows)]
        self._n_chosen[layer] += len(rows)

    def add_logits(self, scores: Floats) -> None:
        """Logits (T, V) of tokens of the prompt; with the last the file is complete. Raises
        `KeptFileError`."""
        try:
            self._logits.write(np.ascontiguousarray(scores, "<f4").data.cast("B"))
            self._n_done += len(scores)
            if self.is_whole:
                self._logits.close()
                with self._archive.open("topk.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, self._chosen)
                self._archive.close()
                self._file.close()
                self._is_written = True
        except OSError as error:
            raise KeptFileError(f"--out: cannot write the file: {error.strerror}") from error

    def close(self) -> None:
        """Leave an empty file where the prompt did not come to its end."""
        if self._is_written:
            return
        for file in (self._logits, self._archive, self._file):
            with contextlib.suppress(OSError):  # a full disk does not take what is buffered either
                file.close()
        with contextlib.suppress(OSError):  # a pipe
            os.ftruncate(self._fd, 0)
