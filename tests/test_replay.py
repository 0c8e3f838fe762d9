"""Replay: the same numbers as the engine for every policy, and limits that nothing beats."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from arms import run_json
from imatrix_builder import write_imatrix
from simulation import geometry, policy_geometry

from coordinator.command.sizes import PoolSize
from coordinator.core.geometry import PoolGeometry
from coordinator.core.policies import PolicyGeometry
from coordinator.core.policy_choice import POLICIES, make_policy
from coordinator.routing.replay import replay
from coordinator.routing.replay_limits import belady, page_cache
from coordinator.routing.replay_report import pool_for
from coordinator.routing.trace_file import Trace, read_trace
from coordinator.routing.trace_statistics import use_counts
from coordinator.routing.usage import UsageCounts, write_usage
from shm.messages import ExpertUse, Need

PROMPTS = Path(__file__).parent / "prompts"
SAMPLED = ("-n", "24", "--temperature", "0.8", "--seed", "1", "--ignore-eos")
POOLS = ("300K", "30%", "70%")  # the first is the smallest that is legal: 2 slots
ARMS = (("--io-workers", "2"), ("--single-process",), ("--io-workers", "0"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of one text, and files with counts of another."""
    folder = tmp_path_factory.mktemp("replay")
    for name in ("novel", "play"):
        run_json("-f", str(PROMPTS / f"{name}.txt"), *SAMPLED, "--trace", str(folder / name))
    other = read_trace(folder / "novel")
    usage = UsageCounts(other.header.fingerprint, 8, 16)
    usage.counts.update(use_counts(other.needs))
    write_usage(folder / "hot.json", usage)
    counts = {
        f"blk.{n}.ffn_up_exps.weight": [usage.counts.get((n, e), 0.0) for e in range(16)]
        for n in range(8)
    }
    write_imatrix(folder / "imatrix.gguf", counts)
    return folder


CASES = [
    *[(policy, pool, False) for policy in POLICIES for pool in POOLS],
    *[("lfu", pool, False) for pool in ("11%", "all")],  # below the token cycle; and preloaded
    *[(policy, "30%", True) for policy in ("lfu", "calibrated")],
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_the_engine_and_its_replay_count_the_same(folder: Path, number: int) -> None:
    policy, pool, seeded = CASES[number]
    arm = ARMS[number % len(ARMS)]
    flags: tuple[str, ...] = ()
    if policy == "static" or seeded:
        flags = ("--hot-set", str(folder / "hot.json"))
    elif policy == "imatrix":
        flags = ("--imatrix", str(folder / "imatrix.gguf"))
    path = folder / "now"
    record = run_json(
        "-f", str(PROMPTS / "play.txt"), *SAMPLED, "--trace", str(path), "--chunk", "64",
        "--policy", policy, "--pool", pool, *flags, *arm,
    )  # fmt: skip
    trace = read_trace(path)
    chosen = pool_for(trace, PoolSize(n_bytes=int(record["settings"]["pool"])))
    counts = use_counts(read_trace(folder / "novel").needs) if flags else {}
    shape = PolicyGeometry(chosen.geometry.class_of_layer, chosen.slots_of_class)
    outcome = replay(trace.needs, chosen.geometry, make_policy(policy, shape, counts, 2))
    experts = record["experts"]
    assert (outcome.all.requests, outcome.all.hits) == (experts["requests"], experts["hits"])
    assert outcome.all.missed_bytes == experts["bytes_read"] or pool == "all"
    assert outcome.first.hit_rate == pytest.approx(experts["first_8_decode_hit_rate"], abs=1e-6)


def random_needs(seed: int, n_layers: int, n_experts: int, n_steps: int) -> list[Need]:
    """Steps of some experts each; every tenth is a prompt that uses nearly all."""
    rng = random.Random(seed)
    needs = []
    for step in range(1, n_steps + 1):
        is_prompt = step % 10 == 1
        for layer in range(n_layers):
            n_used = n_experts - 1 if is_prompt else rng.randint(1, 3)
            chosen = sorted(rng.sample(range(n_experts), n_used))
            uses = tuple(ExpertUse(expert, 1, int(is_prompt)) for expert in chosen)
            needs.append(Need(step, layer, uses, (), ()))
    return needs


@pytest.mark.parametrize("n_slots", [2, 3, 6, 12, 23])
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_beats_belady(policy: str, n_slots: int) -> None:
    needs = random_needs(7, 3, 8, 60)
    limit = belady(needs, dict.fromkeys(range(3), 0), (n_slots,), dict.fromkeys(range(3), 1))
    chosen = make_policy(policy, policy_geometry(3, n_slots), {(0, 1): 3.0, (2, 5): 2.0}, 2)
    found = replay(needs, geometry(3, 8, n_slots), chosen)
    assert found.all.requests == limit.all.requests
    assert found.all.hits <= limit.all.hits


def best_by_trying(needs: Sequence[Need], n_slots: int) -> int:
    """Most hits over all choices of what stays after each use, one expert at a time."""
    uses = [(need.layer, use.expert) for need in needs for use in need.experts]
    best: dict[frozenset[tuple[int, int]], int] = {frozenset(): 0}
    for key in uses:
        after: dict[frozenset[tuple[int, int]], int] = {}
        for cache, hits in best.items():
            if key in cache:
                options = [(cache, hits + 1)]
            elif len(cache) < n_slots:
                options = [(cache | {key}, hits)]
            else:
                options = [((cache - {gone}) | {key}, hits) for gone in cache]
            for option, n_hits in options:
                after[option] = max(after.get(option, 0), n_hits)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_belady_is_the_best_there_is(seed: int, n_slots: int) -> None:
    """One expert per need, so that the order of uses is the order of needs."""
    rng = random.Random(seed)
    needs = [
        Need(step, rng.randrange(2), (ExpertUse(rng.randrange(3), 1, 0),), (), ())
        for step in range(1, 25)
    ]
    found = belady(needs, {0: 0, 1: 0}, (n_slots,), {0: 1, 1: 1})
    assert found.all.hits == best_by_trying(needs, n_slots)


def test_classes_have_slots_of_their_own() -> None:
    """A class that is never full does not lend to one that is."""
    needs = [
        Need(step, layer, (ExpertUse(expert, 1, 0),), (), ())
        for step, (layer, expert) in enumerate(itertools.product((0, 1), (0, 1, 0, 1)), start=1)
    ]
    assert belady(needs, {0: 0, 1: 1}, (1, 2), {0: 5, 1: 7}).all.hits == 2
    assert belady(needs, {0: 0, 1: 1}, (2, 2), {0: 5, 1: 7}).all.hits == 4


def test_a_page_cache_goes_by_bytes() -> None:
    """Two small experts take the room of a large one."""
    uses = [(0, 0), (0, 1), (1, 0), (0, 0), (0, 1)]
    needs = [Need(n, layer, (ExpertUse(e, 1, 0),), (), ()) for n, (layer, e) in enumerate(uses)]
    sizes = {0: 10, 1: 20}
    assert page_cache(needs, sizes, 40).all.hits == 2
    assert page_cache(needs, sizes, 39).all.hits == 0
    assert page_cache(needs, sizes, 39).all.missed_bytes == 4 * 10 + 20


class WithoutShare(PoolGeometry):
    """A pool in which a prompt may push out everything."""

    def share_of_layers(self, slots_of_class: Sequence[int]) -> dict[int, int]:
        """See `PoolGeometry`."""
        return dict.fromkeys(self.class_of_layer, sum(slots_of_class))


@pytest.mark.parametrize("policy", ["lru", "layer-lru", "lfu", "slru", "calibrated"])
def test_a_prompt_leaves_what_the_answer_needs(long_prompt: Trace, policy: str) -> None:
    """The first tokens hit no less with the rule that keeps a prompt to its layer's share."""
    hits = {"with": 0, "without": 0}
    for share in (0.25, 0.5, 0.75):
        pool = pool_for(long_prompt, PoolSize(share=share))
        for name, shape in (("with", pool.geometry), ("without", without_share(pool.geometry))):
            slots = PolicyGeometry(shape.class_of_layer, pool.slots_of_class)
            outcome = replay(long_prompt.needs, shape, make_policy(policy, slots, {}, 2))
            hits[name] += outcome.first.hits
    assert hits["with"] >= hits["without"]


@pytest.fixture(scope="module")
def long_prompt(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Some hundred tokens in three styles, and the beginning of the answer."""
    folder = tmp_path_factory.mktemp("long")
    texts = [path.read_text() for path in sorted(PROMPTS.glob("*.txt"))]
    (folder / "prompt").write_text("\n".join(texts * 2))
    flags = ("-n", "9", "--temperature", "0.8", "--seed", "1", "--ignore-eos")
    run_json("-f", str(folder / "prompt"), *flags, "--trace", str(folder / "trace"))
    return read_trace(folder / "trace")


def without_share(shape: PoolGeometry) -> PoolGeometry:
    fields = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    return WithoutShare(**fields)
