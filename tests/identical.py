"""Settings that must not change a bit, and the combinations of them that are tried.

    python tests/identical.py --all      every combination (minutes); `make identical`

`covering_arms` is a set in which every pair of values of two settings occurs together at least
once: what the suite runs.
"""

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from arms import pack, run_arm
from gguf_builder import tiny_model
from imatrix_builder import write_imatrix

from compute_worker.arch import resolve
from coordinator.core.slot_classes import smallest_pool_bytes
from coordinator.routing.usage import fresh_usage, write_usage
from io_worker.model_file import open_model

Arm = tuple[str, ...]  # one value of every setting

SETTINGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "processes": {
        "io-workers 0": ("--io-workers", "0"),
        "io-threads 2": ("--io-workers", "0", "--io-threads", "2"),
        "io-workers 1 depth 1": ("--io-workers", "1", "--queue-depth", "1"),
        "io-workers 1 depth 4": ("--io-workers", "1", "--queue-depth", "4"),
        "io-workers 2 depth 4": ("--io-workers", "2", "--queue-depth", "4", "--poll", "off"),
        "single process": ("--single-process",),
        "single process, io-threads 2": ("--single-process", "--io-threads", "2"),
    },
    "reader": {
        "direct": ("--reader", "direct"),
        "direct, whole layers": ("--reader", "direct", "--read-unit", "layer"),
        "buffered, kept": ("--reader", "buffered", "--drop-cache", "no"),
        "buffered, dropped": ("--reader", "buffered", "--drop-cache", "yes"),
        "mmap": ("--reader", "mmap"),
        "willneed": ("--reader", "willneed"),
        "populate": ("--reader", "populate"),
    },
    "policy": {
        **{name: ("--policy", name) for name in ("lru", "layer-lru", "lfu", "slru", "calibrated")},
        "static": ("--policy", "static", "--hot-set", "hot set"),
        "imatrix": ("--policy", "imatrix", "--imatrix", "imatrix file"),
        "the kernel's": (),
    },
    "pool": {
        "smallest": ("--pool", "smallest"),
        "half": ("--pool", "50%"),
        "all": ("--pool", "all"),
        "all, in compute's memory": ("--pool", "all", "--experts-in", "own"),
        "none": (),
    },
    "chunk": {
        "64": ("--chunk", "64"),
        "512, dense mapped": ("--chunk", "512", "--dense", "mapped"),
    },
    "file": {"plain": (), "packed": ()},
}
PAGE_CACHE_READERS = ("mmap", "willneed", "populate")
ONE_PAGE_AT_A_TIME = (  # how processes can touch pages
    "io-workers 0", "io-workers 1 depth 1", "single process",
)  # fmt: skip
N_PROMPT_TOKENS, N_NEW_TOKENS = 150, 8
PACKED_NAME = "packed.gguf"


def all_arms() -> list[Arm]:
    """Every combination that makes sense."""
    return [arm for arm in itertools.product(*SETTINGS.values()) if _is_legal(arm)]


def _is_legal(arm: Arm) -> bool:
    """Without a pool there is no policy; touching goes page by page."""
    processes, reader, policy, pool, *_ = arm
    if reader == "mmap" and processes not in ONE_PAGE_AT_A_TIME:
        return False
    has_no_pool = reader in PAGE_CACHE_READERS
    return (policy == "the kernel's") == (pool == "none") == has_no_pool


def covering_arms() -> list[Arm]:
    """A small set of arms with every pair of values; greedy, the same at every call."""
    uncovered = pairs_of(all_arms())
    rng = random.Random(0)
    chosen = []
    while uncovered:
        candidates = rng.sample(all_arms(), 200)
        best = max(candidates, key=lambda arm: len(uncovered & _pairs(arm)))
        if not uncovered & _pairs(best):  # a pair that is rare among all: look for it
            best = next(arm for arm in all_arms() if uncovered & _pairs(arm))
        chosen.append(best)
        uncovered -= _pairs(best)
    return chosen


def pairs_of(arms: Iterable[Arm]) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    """Values of two settings that occur together, each with the number of its setting."""
    return {pair for arm in arms for pair in _pairs(arm)}


def _pairs(arm: Arm) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(itertools.combinations(enumerate(arm), 2))


def model_of(arm: Arm, model: Path) -> Path:
    """The file that an arm runs, of the two that `make_model` made."""
    return model.with_name(PACKED_NAME) if arm[-1] == "packed" else model


def flags_of(arm: Arm, model: Path) -> tuple[str, ...]:
    """The flags of an arm."""
    _, smallest = describe(model_of(arm, model))
    found = [SETTINGS[name][value] for name, value in zip(SETTINGS, arm, strict=True)]
    meant = {
        "smallest": str(smallest),
        "hot set": str(model.with_name("hot.json")),
        "imatrix file": str(model.with_name("imatrix.gguf")),
    }
    return tuple(meant.get(flag, flag) for flag in itertools.chain(*found))


def make_model(folder: Path) -> Path:
    """Four layers of two slab sizes, so that slot classes and waves occur; beside it the same model
    packed, and counts."""
    path = tiny_model(folder / "tiny.gguf", n_layers=4, quantisation="Q4_K_M", n_active=3)
    pack(path, path.with_name(PACKED_NAME))
    model = open_model(path)
    usage = fresh_usage(model.fingerprint, resolve(model))
    keys = itertools.product(range(usage.n_layers), range(usage.n_experts))
    usage.counts.update({key: 1.0 + sum(key) % 3 for key in keys})
    write_usage(path.with_name("hot.json"), usage)
    counts = {f"blk.{n}.ffn_up_exps.weight": list(range(usage.n_experts)) for n in range(4)}
    write_imatrix(path.with_name("imatrix.gguf"), counts)
    return path


def prompt_tokens(vocabulary_size: int) -> list[int]:
    """Different tokens, so that routing varies."""
    rng = random.Random(3)
    return [rng.randrange(vocabulary_size) for _ in range(N_PROMPT_TOKENS)]


def main() -> int:
    """Run the arms, report those that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every combination")
    arms = all_arms() if parser.parse_args().all else covering_arms()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder)
        tokens, _ = describe(model)
        expected = None
        n_different = 0
        for number, arm in enumerate(arms):
            flags = flags_of(arm, model)
            own = model_of(arm, model)
            found = run_arm(own, tokens, flags, folder / "kept.npz", N_NEW_TOKENS)
            expected = expected or found
            n_different += found != expected
            verdict = "same" if found == expected else "DIFFERENT"
            print(f"{number + 1}/{len(arms)} {verdict}: {', '.join(arm)}", flush=True)
    print(f"{len(arms)} arms, {n_different} different")
    return 1 if n_different else 0


def describe(model: Path) -> tuple[list[int], int]:
    """A prompt for the model, and the bytes of its smallest legal pool."""
    spec = resolve(open_model(model))
    return prompt_tokens(spec.vocabulary_size), smallest_pool_bytes(spec.slabs)


if __name__ == "__main__":
    sys.exit(main())
