"""What 8-bit activations cost in accuracy, ours beside llama.cpp's, on small models.

    python tests/divergence.py MODEL… --server PATH/llama-server

For each model: random prompts of 64 tokens, and after each the distribution of the next token from
our `exact` numerics, our `fast`, and the server (`/completion` with `n_probs`; the vocabulary must
not be larger than 512). One line per model: the mean Kullback-Leibler divergence of the latter two
from `exact`, in nats, and their ratio. Ends with 1 if a ratio is above 1.10.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

N_PROMPT_TOKENS = 64
N_PROBABILITIES = 512
HIGHEST_RATIO = 1.10
START_SECONDS = 60
MOST_TRIES = 20
LogShares = npt.NDArray[np.float64]


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--server", required=True)
    parser.add_argument("--prompts", type=int, default=16)
    options = parser.parse_args()
    worst = 0.0
    for model in options.models:
        prompts = [random_prompt(seed) for seed in range(options.prompts)]
        exact = [ours(model, prompt, "exact") for prompt in prompts]
        fast = [ours(model, prompt, "fast") for prompt in prompts]
        with server(options.server, model) as port:
            theirs = [asked(port, prompt, exact[0].size) for prompt in prompts]
        own, peer = mean_divergence(exact, fast), mean_divergence(exact, theirs)
        # below this both are rounding of float32 and half-precision keys: no ratio is meant
        ratio = own / peer if peer > 1e-9 else 0.0
        worst = max(worst, ratio)
        print(f"{model.name:36} fast {own:.2e}  peer {peer:.2e}  ratio {ratio:.2f}", flush=True)
    return 1 if worst > HIGHEST_RATIO else 0


def random_prompt(seed: int) -> list[int]:
    """Ids that every small vocabulary has."""
    return random.Random(seed).choices(range(5, 250), k=N_PROMPT_TOKENS)


def ours(model: Path, prompt: list[int], numerics: str) -> LogShares:
    """Log probabilities (V) of the token after the prompt, through all processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npz"
        subprocess.run(
            [sys.executable, "-P", "-m", "coordinator", "eval", str(model), "--numerics", numerics,
             "--tokens", ",".join(map(str, prompt)), "--out", str(out)],
            check=True, capture_output=True,
        )  # fmt: skip
        logits = np.load(out)["logits"][-1].astype(np.float64)
    logits -= logits.max()
    shares: LogShares = logits - np.log(np.exp(logits).sum())
    return shares


@contextmanager
def server(path: str, model: Path) -> Iterator[int]:
    """The peer, ready, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    command = [path, "-m", str(model), "--port", str(port), "-t", "2", "-c", "256", "--no-webui"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        yield port
    finally:
        process.kill()
        process.wait()


def asked(port: int, prompt: list[int], n_vocabulary: int) -> LogShares:
    """The server's log probabilities (V). Where it draws the end of the text it tells none, so it
    is asked again."""
    body: dict[str, Any] = {"prompt": prompt, "n_predict": 1, "n_probs": N_PROBABILITIES,
                            "temperature": 1.0, "cache_prompt": False}  # fmt: skip
    for seed in range(MOST_TRIES):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion",
            json.dumps({**body, "seed": seed}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.load(answer).get("completion_probabilities")
        if told:
            break
    else:
        raise SystemExit(f"divergence: the server told no probabilities in {MOST_TRIES} tries")
    shares = np.full(n_vocabulary, np.nan)
    for each in told[0]["top_logprobs"]:
        shares[each["id"]] = each["logprob"]
    assert not np.isnan(shares).any(), "the server did not tell of every token"
    return shares


def mean_divergence(exact: list[LogShares], others: list[LogShares]) -> float:
    """Mean over prompts of ``sum p (log p - log q)``."""
    each = [float(np.sum(np.exp(p) * (p - q))) for p, q in zip(exact, others, strict=True)]
    return float(np.mean(each))


if __name__ == "__main__":
    sys.exit(main())
