"""Which rows of a step's batch matter: those of which something is drawn, and a prompt's last ones.

Rows are the tokens of all slices in order: T in all.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from compute_worker.matrix import Integers
from shm.messages import Slice

N_RECENT_TOKENS = 64  # of a prompt slice: what they use is what the answer will use first


def drawn_rows(slices: Sequence[Slice]) -> Integers | None:
    """Rows of which something is drawn, and one at least; None: all of them."""
    ends = np.cumsum([part.n_tokens for part in slices]) - 1
    drawn = ends[[part.sample for part in slices]]
    rows = drawn if len(drawn) else ends[-1:]
    return None if len(rows) == ends[-1] + 1 else rows


def recent_rows(
    slices: Sequence[Slice], n_prompt_tokens: Callable[[int], int]
) -> npt.NDArray[np.bool_] | None:
    """Marks (T,) the last tokens of prompt slices; None where there is no prompt.

    `n_prompt_tokens` is asked by request.
    """
    marks = []
    for part in slices:
        is_prompt = part.start < n_prompt_tokens(part.request)
        n_recent = min(part.n_tokens, N_RECENT_TOKENS) if is_prompt else 0
        marks += [False] * (part.n_tokens - n_recent) + [True] * n_recent
    return np.array(marks) if any(marks) else None
