"""Which experts a step used, as the coordinator is told: of a layer that needs a grant with its
`Need`, of one that needed none with the next message.

The coordinator counts and decides by these, so they come in the order of the layers, each once.
"""

import numpy as np
import numpy.typing as npt

from compute_worker.matrix import Integers
from shm.messages import ExpertUse, KnownLayer


class ToldUses:
    """Uses of the running step."""

    def __init__(self, n_layers: int, n_active: int) -> None:
        self._last_layer = n_layers - 1
        self._n_active = n_active
        self._recent: npt.NDArray[np.bool_] | None = None
        self._recent_wanted: npt.NDArray[np.bool_] | None = None
        self._earlier: list[KnownLayer] = []
        self._guess: tuple[int, ...] = ()

    def begin_step(self, recent: npt.NDArray[np.bool_] | None, wanted: Integers | None) -> None:
        """A step begins; `recent` (T,) marks the last tokens of prompt slices, None: no prompt.
        `wanted`: the rows that the last layer has, None: all."""
        self._recent = self._recent_wanted = recent
        if recent is not None and wanted is not None:
            self._recent_wanted = recent[wanted]

    def of(self, layer: int, pairs: dict[int, Integers]) -> tuple[ExpertUse, ...]:
        """Of one layer; `pairs` as `group_by_expert` has them."""
        recent_rows = self._recent_wanted if layer == self._last_layer else self._recent
        if recent_rows is None:
            return tuple([ExpertUse(expert, len(own), 0) for expert, own in pairs.items()])
        recent = recent_rows.repeat(self._n_active)  # (T*A,)
        uses = [(e, len(own), int(np.count_nonzero(recent[own]))) for e, own in pairs.items()]
        return tuple([ExpertUse(*use) for use in uses])

    def add_known(self, layer: int, pairs: dict[int, Integers], guessed: tuple[int, ...]) -> None:
        """A layer was computed without a grant; `guessed`: experts of the next one."""
        self._earlier.append(KnownLayer(layer, self.of(layer, pairs), guessed))

    def add_guess(self, guessed: tuple[int, ...]) -> None:
        """At the layer that is to be fed these were guessed for the next one."""
        self._guess = guessed

    def take_guess(self) -> tuple[int, ...]:
        """What is told of the next layer with the one at hand."""
        guess, self._guess = self._guess, ()
        return guess

    def take_earlier(self) -> tuple[KnownLayer, ...]:
        """Layers that the next message tells of."""
        earlier, self._earlier = self._earlier, []
        return tuple(earlier)
