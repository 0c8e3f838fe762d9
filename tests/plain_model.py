"""The models once more, plainly: float64, one token at a time, a loop per head and per expert.

The judge of the forward pass. It shares no code with the engine: the file is read with the `gguf`
package, and what an architecture does is written out here again. Only for files of our own making.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize

Doubles = npt.NDArray[np.float64]


class PlainModel:
    """One sequence. `step` appends a token; keys and values are kept in lists."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self._meta = {name: field.contents() for name, field in reader.fields.items()}
        self._arch: str = self._meta["general.architecture"]
        self._weights: dict[str, Doubles] = {
            tensor.name.removesuffix(".weight"): dequantize(tensor.data, tensor.tensor_type).astype(
                np.float64
            )
            for tensor in reader.tensors
        }
        self.n_layers: int = self._key("block_count")
        self.n_vocabulary = len(self._weights["token_embd"])
        self._cache: list[list[tuple[Doubles, Doubles]]] = [[] for _ in range(self.n_layers)]

    def step(self, token: int) -> tuple[Doubles, list[list[int]]]:
        """Logits (V) after this token, and the sorted experts of each layer."""
        hidden = self._weights["token_embd"][token]
        chosen = []
        for layer in range(self.n_layers):
            x = self._rms(hidden, f"blk.{layer}.attn_norm")
            hidden = hidden + self._attention(layer, x)
            x = self._rms(hidden, f"blk.{layer}.ffn_norm")
            change, experts = self._experts(layer, x)
            hidden = hidden + change
            chosen.append(experts)
        head = self._weights.get("output", self._weights["token_embd"])
        return head @ self._rms(hidden, "output_norm"), chosen

    def _key(self, name: str, default: Any = None) -> Any:
        return self._meta.get(f"{self._arch}.{name}", default)

    def _rms(self, x: Doubles, name: str) -> Doubles:
        epsilon = self._key("attention.layer_norm_rms_epsilon")
        return x / np.sqrt(np.mean(x * x) + epsilon) * self._weights[name]

    def _attention(self, layer: int, x: Doubles) -> Doubles:
        block = f"blk.{layer}."
        n_heads, n_kv_heads = (
            self._key("attention.head_count"),
            self._key("attention.head_count_kv"),
        )
        q, k, v = (self._weights[block + f"attn_{part}"] @ x for part in "qkv")
        if self._arch == "olmoe":  # one norm over all heads
            q, k = self._rms(q, block + "attn_q_norm"), self._rms(k, block + "attn_k_norm")
        queries, keys, values = (
            np.split(q, n_heads),
            np.split(k, n_kv_heads),
            np.split(v, n_kv_heads),
        )
        if self._arch == "qwen3moe":  # one norm per head
            queries = [self._rms(head, block + "attn_q_norm") for head in queries]
            keys = [self._rms(head, block + "attn_k_norm") for head in keys]
        position = len(self._cache[layer])
        queries = [self._turned(head, position) for head in queries]
        keys = [self._turned(head, position) for head in keys]
        self._cache[layer].append((np.array(keys), np.array(values)))
        past_keys, past_values = (np.array(part) for part in zip(*self._cache[layer], strict=True))
        mixed = []
        for index, query in enumerate(queries):
            shared = index // (n_heads // n_kv_heads)
            scores = past_keys[:, shared] @ query / np.sqrt(len(query))
            shares = np.exp(scores - scores.max())
            mixed.append(shares / shares.sum() @ past_values[:, shared])
        return self._weights[block + "attn_output"] @ np.concatenate(mixed)

    def _turned(self, head: Doubles, position: int) -> Doubles:
        """Rotary embedding: elements i and i + n/2 as the parts of a complex number."""
        width = self._key("rope.dimension_count", len(head))
        base = self._key("rope.freq_base", 1e4 if self._arch == "olmoe" else 1e6)
        half = width // 2
        angles = position * base ** (-2.0 * np.arange(half) / width)
        turned = (head[:half] + 1j * head[half:width]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag, head[width:]])

    def _experts(self, layer: int, x: Doubles) -> tuple[Doubles, list[int]]:
        block = f"blk.{layer}."
        scores = self._weights[block + "ffn_gate_inp"] @ x
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        chosen = sorted(np.argsort(-shares)[: self._key("expert_used_count")].tolist())
        total = shares[chosen].sum() if self._arch == "qwen3moe" else 1.0
        change = np.zeros_like(x)
        for expert in chosen:
            gate, up, down = (
                self._weights[block + f"ffn_{part}_exps"][expert] for part in ("gate", "up", "down")
            )
            inner = gate @ x
            change += shares[expert] / total * (down @ (inner / (1 + np.exp(-inner)) * (up @ x)))
        return change, chosen
