"""Experts that compute may use without asking: where each lies, and how to see that it is there.

An entry is what C knows as `moe_known_expert`, six words of 64 bits:

    | gate | up | down | mark | first word | second word |

Gate, up and down are addresses; gate 0: not known. At the address `mark` lie the two words as long
as the expert is in its place (see `Regions.entries`); mark 0: nothing needs to be looked at. Marks
are compared at every use, just before it. This module does not know why an expert may be used
(see `standing`, `lasting`), nor for how long.
"""

import ctypes
from collections.abc import Sequence

import numpy as np

from compute_worker.matrix import Addresses

N_ADDRESSES, ENTRY_WORDS = 3, 6


class KnownExperts:
    """`entries` (L, E, 6) of all experts of a model. They change only while no kernel runs."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.entries: Addresses = np.zeros((n_layers, n_experts, ENTRY_WORDS), np.uint64)

    def add(self, layer: int, experts: Sequence[int], entries: Addresses) -> None:
        """These may be used from now on; entries (n, 6), or (n, 3) where there are no marks."""
        self.entries[layer, experts, entries.shape[1] :] = 0
        self.entries[layer, experts, : entries.shape[1]] = entries

    def forget(self, layer: int, experts: Sequence[int]) -> None:
        """These may not be used any more."""
        self.entries[layer, experts] = 0

    def forget_layer(self, layer: int) -> None:
        """Nothing of the layer may be used any more."""
        self.entries[layer] = 0

    def has(self, layer: int, expert: int) -> bool:
        """Whether it is known; its mark is not looked at."""
        return bool(self.entries[layer, expert, 0])

    def addresses(self, layer: int, experts: Sequence[int]) -> Addresses:
        """Of gate, up and down of some experts (n, 3), for a kernel."""
        return addresses_of(self.entries[layer, experts])


def addresses_of(entries: Addresses) -> Addresses:
    """Of gate, up and down: (n, 6) -> (n, 3)."""
    return entries[:, :N_ADDRESSES]


def may_be_used(entries: Addresses) -> bool:
    """Whether all of these (n, 6) are known, and their marks are as they should be."""
    return all(gate and _is_marked(mark, words) for gate, _, _, mark, *words in entries.tolist())


def _is_marked(mark: int, words: list[int]) -> bool:
    return not mark or list((ctypes.c_uint64 * 2).from_address(mark)) == words
