"""Makes the golden values of `test_forward`: `PYTHONPATH=tests python tests/golden/make_golden.py`.

For each case a tiny model is built, and `plain_model` (float64) computes the logits of a prompt,
the chosen experts and some greedy tokens. The models themselves are not kept: the same options give
the same bytes, and a digest tells if they do not.
"""

import hashlib
import tempfile
from pathlib import Path

import numpy as np
from gguf_builder import tiny_model
from golden_cases import CASES
from plain_model import PlainModel

N_PROMPT, N_GREEDY = 70, 12  # past one tile of 64 positions
KEPT = [0, 1, 31, 63, 64, 69]  # positions whose logits are kept: files stay small


def main() -> None:
    """Write all cases beside this file."""
    for seed, (name, options) in enumerate(CASES.items()):
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_model(Path(folder) / "model.gguf", seed=seed, **options)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            model = PlainModel(path)
        prompt = np.random.default_rng(seed).integers(0, model.n_vocabulary, N_PROMPT)
        steps = [model.step(token) for token in prompt.tolist()]
        last, greedy = steps[-1][0], []
        for _ in range(N_GREEDY):
            greedy.append(int(np.argmax(last)))
            last = model.step(greedy[-1])[0]
        np.savez_compressed(
            Path(__file__).parent / f"{name}.npz",
            digest=digest,
            prompt=prompt.astype(np.int32),
            kept=np.array(KEPT, np.int32),
            logits=np.array([steps[position][0] for position in KEPT], np.float32),
            chosen=np.array([chosen for _, chosen in steps], np.int16).swapaxes(0, 1),
            greedy=np.array(greedy, np.int32),
        )


if __name__ == "__main__":
    main()
