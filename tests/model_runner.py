"""Runs a model file through the compute core in tests: all experts in memory, no other process."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from compute_worker.arch import ModelSpec, resolve
from compute_worker.forward import Batch, embed, forward, logits
from compute_worker.kernel_choice import select
from compute_worker.kernels import Kernels
from compute_worker.known_experts import KnownExperts
from compute_worker.kv import KvCache, n_blocks_needed
from compute_worker.matrix import Addresses, Floats, Integers, expert_shape, group_by_expert
from compute_worker.weights import load_weights
from io_worker.model_file import open_model
from io_worker.reader import close_files, open_files


class ModelRunner:
    """A loaded model with a KV cache. Sequences are block tables that the caller keeps."""

    def __init__(
        self,
        path: Path,
        *,
        kernels: Kernels | None = None,
        kv_kind: str = "f32",
        n_blocks: int = 16,
    ) -> None:
        model = open_model(path)
        self.spec: ModelSpec = resolve(model)
        self.kernels = kernels or select("numpy", "exact", 1)
        self._files = open_files(model.paths)
        self.weights = load_weights(self.spec, self._files, lambda done, total: None)
        self._raw = [np.fromfile(name, np.uint8) for name in model.paths]
        spec = self.spec
        self.kv = KvCache(spec.n_layers, spec.n_kv_heads, spec.head_width, n_blocks, kv_kind)
        self.chosen: list[list[Integers]] = [[] for _ in range(spec.n_layers)]  # as forward asks

    def close(self) -> None:
        close_files(self._files)

    def new_table(self, n_tokens: int) -> list[int]:
        """Blocks for a sequence of this length."""
        return [self.kv.allocate() for _ in range(n_blocks_needed(n_tokens))]

    def batch(self, *slices: tuple[Sequence[int], int, list[int]]) -> Batch:
        """A ragged batch of (token ids, first position, block table)."""
        n_columns = max(len(table) for _, _, table in slices)
        tables = np.zeros((len(slices), n_columns), np.int32)
        for row, (_, _, table) in enumerate(slices):
            tables[row, : len(table)] = table
        lengths = [len(tokens) for tokens, _, _ in slices]
        starts = [
            np.arange(start, start + n) for (_, start, _), n in zip(slices, lengths, strict=True)
        ]
        return Batch(
            token_ids=np.concatenate([tokens for tokens, _, _ in slices]).astype(np.int32),
            positions=np.concatenate(starts).astype(np.int32),
            sequence_of_token=np.repeat(np.arange(len(slices)), lengths).astype(np.int32),
            tables=tables,
        )

    def layers(self, batch: Batch, hidden: Floats, layers: range) -> Floats:
        """Apply some layers."""
        given = (batch, hidden, layers, self.kv, self.experts, None)
        return forward(self.weights, *given, self.kernels)

    def run(self, batch: Batch) -> Floats:
        """Logits of every token of the batch."""
        hidden = self.layers(batch, embed(self.weights, batch), range(self.spec.n_layers))
        return logits(self.weights, hidden, self.kernels)

    def experts(self, layer: int, x: Floats, chosen: Integers, shares: Floats) -> Floats:
        """What `forward` calls: every expert from the bytes of the file."""
        self.chosen[layer].append(chosen)
        slabs = self.spec.slabs.layers[layer]
        groups = group_by_expert(chosen)
        addresses = self.addresses()[layer, list(groups)]
        out = np.empty((chosen.size, self.spec.width), np.float32)
        self.kernels.expert_blocks(
            expert_shape(slabs), addresses, list(groups.values()), self.spec.n_active, x, out
        )
        return self.kernels.combine(out, shares)

    def addresses(self) -> Addresses:
        """Where every expert of every layer lies: (L, E, 3)."""
        starts = [raw.__array_interface__["data"][0] for raw in self._raw]
        found = [
            [
                [starts[part.file] + part.offset for part in slabs.ranges(expert)]
                for expert in range(self.spec.n_experts)
            ]
            for slabs in self.spec.slabs.layers
        ]
        return np.array(found, np.uint64)

    def known(self) -> KnownExperts:
        """All of them, without marks."""
        addresses = self.addresses()
        known = KnownExperts(*addresses.shape[:2])
        for layer, own in enumerate(addresses):
            known.add(layer, range(len(own)), own)
        return known
