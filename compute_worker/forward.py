"""The forward pass over a ragged batch: tokens of several sequences in one matrix.

It can stop and go on at every layer boundary: all state is `hidden`, the layer to go on with, and
the KV cache. Experts arrive through a callable, so this module does not know where they lie.

No result depends on what else is in the batch: every operation works row by row, with an order of
additions that is fixed by the length of the row. Keep it so (see `kernels`).

Shapes: T tokens, D model width, A active experts, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from compute_worker.arch import ModelSpec
from compute_worker.dense_layer import attend_some
from compute_worker.kernels import Kernels, LayerRun, Places
from compute_worker.kv import KvCache
from compute_worker.matrix import Addresses, Floats, Integers
from compute_worker.weights import Weights

# Attention takes a prompt chunk in parts of so many tokens: a quarter of its arrays at a chunk of
# 1,024, and no slower, since the weights are read once per part from a part that is large enough.
ATTENTION_TOKENS = 256
# A step of so few tokens is over in tens of milliseconds. Between two layers, what Python itself
# needs has left the caches: a turn there costs 150 us, five times as much as with a small model.
FEW_TOKENS = 8
Rotation = tuple[Floats, Floats]  # cosines and sines, (T, rope_width / 2)
# experts(layer, x (T, D), chosen (T, A) ascending ids, weights (T, A)) -> (T, D)
Experts = Callable[[int, Floats, Integers, Floats], Floats]


class Known(Protocol):
    """Experts that may be used without asking: layers that choose among these need nobody."""

    @property
    def entries(self) -> Addresses:
        """Of all experts of the model (L, E, 6), see `KnownExperts`; valid for one call."""

    @property
    def n_guesses(self) -> int:
        """Experts of the next layer to be guessed at each layer of a single token."""

    def used(self, run: LayerRun) -> None:
        """Some layers are done."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokens of one step. The tokens of a sequence are in ascending position, all of its earlier
    positions are in the KV cache, and its table has a block for each position."""

    token_ids: Integers  # (T)
    positions: Integers  # (T), absolute in their sequence
    sequence_of_token: Integers  # (T), row of `tables`
    tables: Integers  # (S, most blocks), KV blocks of each sequence

    def parts(self, most_tokens: int) -> "Iterator[tuple[slice, Batch]]":
        """The same tokens in order, `most_tokens` at a time, with their rows."""
        for start in range(0, len(self.token_ids), most_tokens):
            rows = slice(start, start + most_tokens)
            owners = self.sequence_of_token[rows]
            yield rows, Batch(self.token_ids[rows], self.positions[rows], owners, self.tables)


def embed(weights: Weights, batch: Batch) -> Floats:
    """The hidden state before layer 0: (T, D)."""
    return weights.embedding.rows(batch.token_ids)


@np.errstate(all="ignore")  # the weights of a hostile file may be NaN
def forward(
    weights: Weights,
    batch: Batch,
    hidden: Floats,
    layers: range,
    kv: KvCache,
    experts: Experts,
    known: Known | None,
    kernels: Kernels,
    wanted: Integers | None = None,
    before: Callable[[int], None] = lambda layer: None,
) -> Floats:
    """Apply layers to `hidden` (T, D), in place; returns it. Writes their keys and values.

    `before` is called with the next layer, and may stop here by raising: before each one, but few
    tokens go on without it through layers whose experts are `known`. For those `experts` is not
    called. After the last layer only the `wanted` rows (W) are what they should be (None: all): of
    a prompt's other tokens nobody needs more than keys and values there.
    """
    spec = weights.spec
    parts = [(rows, places_of(spec, part)) for rows, part in batch.parts(ATTENTION_TOKENS)]
    if wanted is not None or len(parts) > 1:
        known = None
    at_once = spec.n_layers if len(hidden) <= FEW_TOKENS else 1
    while layers:
        before(layers.start)
        if known is not None:
            n_guesses = known.n_guesses if len(hidden) == 1 else 0
            where = (parts[0][1], kv, known.entries, n_guesses)
            given = (weights, layers[:at_once], hidden, *where)
            run = kernels.known_layers(kernels, *given)
            known.used(run)
            layers = layers[len(run.layers) :]
            if run.unknown is None:
                continue
            hidden += experts(layers.start, *run.unknown)  # (T, D)
        elif wanted is not None and layers.start == spec.n_layers - 1:
            _last_layer_of_some(weights, parts, hidden, wanted, kv, experts, kernels)
        else:
            for rows, places in parts:
                kernels.attend(kernels, weights, layers.start, hidden[rows], places, kv)
            hidden += experts(layers.start, *kernels.choose(kernels, weights, layers.start, hidden))
        layers = layers[1:]
    return hidden


def _last_layer_of_some(
    weights: Weights,
    parts: Sequence[tuple[slice, Places]],
    hidden: Floats,
    wanted: Integers,
    kv: KvCache,
    experts: Experts,
    kernels: Kernels,
) -> None:
    """The last layer of the `wanted` rows; of the others its keys and values."""
    last = weights.spec.n_layers - 1
    for rows, places in parts:
        inside = wanted[(rows.start <= wanted) & (wanted < rows.stop)] - rows.start
        attend_some(kernels, weights, last, hidden[rows], inside, places, kv)
    some = hidden[wanted]  # (W, D)
    x, chosen, shares = kernels.choose(kernels, weights, last, some)
    hidden[wanted] = some + experts(last, x, chosen, shares)


def logits(weights: Weights, hidden: Floats, kernels: Kernels) -> Floats:
    """Scores of every token of the vocabulary after the last layer: (N, D) -> (N, V)."""
    x = kernels.rms_norm(hidden, weights.output_norm, weights.spec.rms_epsilon)
    return kernels.matmul(weights.output, x)


def places_of(spec: ModelSpec, batch: Batch) -> Places:
    """Where the tokens of a batch are, for all of its layers."""
    rotation = rotation_of(spec, batch.positions)
    return Places(batch.tables, batch.sequence_of_token, batch.positions, *rotation)


def rotation_of(spec: ModelSpec, positions: Integers) -> Rotation:
    """Angles of rotary embedding: pair i turns by ``position * base ** (-2 i / rope_width)``."""
    exponents = np.arange(0, spec.rope_width, 2) / spec.rope_width
    angles = positions[:, None] * spec.rope_base**-exponents  # (T, rope_width / 2), float64
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
