"""Makes `demo.npz`: `python tests/golden/make_demo.py REFERENCE.npz`.

The reference holds, for three prompts, what the shipped model computes: logits of every position,
64 greedy tokens, and the experts chosen for prompt 1. It was computed in float32 by Hugging Face
transformers (`OlmoeForCausalLM`) on the weights that `gguf.quants.dequantize` gives, and llama.cpp
draws the same greedy tokens. Kept are all of it but most columns of the logits.
"""

import sys
from pathlib import Path

import numpy as np

N_PROMPTS = 3
COLUMN_STEP = 17  # of 4096 columns


def main() -> None:
    """Write the small file beside this one."""
    kept = {}
    with np.load(sys.argv[1]) as reference:
        columns = np.arange(0, reference["logits_0"].shape[1], COLUMN_STEP)
        for number in range(N_PROMPTS):
            logits = reference[f"logits_{number}"]
            kept[f"prompt_{number}"] = reference[f"prompt_{number}"]
            kept[f"greedy_{number}"] = reference[f"greedy_{number}"]
            kept[f"logits_{number}"] = logits[:, columns]
            kept[f"largest_{number}"] = np.abs(logits).max()
        kept["topk_1"] = reference["topk_1"]
    np.savez_compressed(Path(__file__).with_name("demo.npz"), columns=columns, **kept)


if __name__ == "__main__":
    main()
