"""The tiny models whose golden values are kept in `golden`: options of `tiny_model` by name.

The place of a case is its seed, so new ones go to the end.
"""

from collections.abc import Mapping
from typing import Any

CASES: Mapping[str, Mapping[str, Any]] = {
    "olmoe-q8_0": {"arch": "olmoe", "quantisation": "Q8_0"},
    "olmoe-q4_k_m": {"arch": "olmoe", "quantisation": "Q4_K_M", "n_active": 3},
    "qwen3moe-q4_0": {"arch": "qwen3moe", "quantisation": "Q4_0", "n_active": 3},
    "qwen3moe-f16-tied": {"arch": "qwen3moe", "quantisation": "F16", "tied": True, "n_experts": 5},
}
