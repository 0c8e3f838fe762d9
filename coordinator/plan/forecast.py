"""What speed to expect of a plan: from the times of reads and of arithmetic, and a guess of hits.

Pure arithmetic. Per layer of a decode step, m of its A experts are missing; they are read as one
burst while the others are computed, and the last to land is computed after the burst:

    layer = dense + message + max(A · expert, burst(m) + expert)        burst(0) = 0

m is binomial with the miss rate. The hit rate depends on the text; two profiles bound what was
seen. Both are the default policy's rates in steady state by the token cycles that the pool holds:

- `CONCENTRATED`: the generator's routing (`synth olmoe`, 64 experts, 8 used, random ids). Public
  measurements with an LRU lie a little below: OLMoE 28 % at 1 cycle and 68 % at 3, Qwen3-30B 54 %
  at 1.9 and 78 % at 3.8 (the LRU of the generator's routing: 31, 69, 44, 80 %).
- `EVEN`: English texts on the shipped model (16 experts, 2 used; means of `tests/hit_rates.md`),
  which spreads its tokens more.

A model that uses a smaller share of its experts hits a little less at the same number of cycles:
the fourth root of the ratio fits Qwen3's (128 experts, 8 used) to OLMoE's.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Profile = Sequence[tuple[float, float]]  # (token cycles in the pool, hit rate), ascending

CONCENTRATED: Profile = (
    (0.0, 0.0), (0.48, 0.21), (0.72, 0.30), (1.0, 0.39), (1.27, 0.47), (1.6, 0.54), (2.08, 0.635),
    (2.64, 0.72), (3.0, 0.77), (3.27, 0.80), (4.0, 0.87), (4.8, 0.93), (5.36, 0.957), (6.0, 0.976),
    (8.0, 1.0),
)  # fmt: skip
EVEN: Profile = (
    (0.0, 0.0), (0.75, 0.19), (2.0, 0.45), (4.0, 0.72), (6.0, 0.89), (7.3, 0.98), (8.0, 1.0),
)  # fmt: skip
PROFILES: Mapping[str, Profile] = {"concentrated": CONCENTRATED, "even": EVEN}
PROFILE_EXPERTS_PER_ACTIVE = 8.0
MESSAGE_SECONDS = 150e-6  # one `Need` and its grants; none where everything stays
DISK_BOUND = 1.1  # a token takes so much longer than its arithmetic
START_SECONDS = 1.0  # of the processes: interpreters and libraries


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model matters here."""

    n_layers: int
    n_experts: int  # of a layer
    n_active: int
    slab_bytes: int  # mean
    dense_bytes: int


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """Seconds of a step of `n_tokens`: everything but the experts, and one expert's share."""

    n_tokens: int
    dense_seconds: float
    expert_seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the probes found. `burst_seconds` by the number of experts read at once."""

    burst_seconds: Mapping[int, float]
    decode: ComputeTimes
    prompt: ComputeTimes


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots for experts of all layers, and the prompt that is asked about with its chunks."""

    n_slots: int
    chunk_tokens: int
    prompt_tokens: int
    hit_share: float = 1.0  # of the layers: in the others the policy never hits
    mapped_bytes: int = 0  # dense weights that are left to the page cache
    lost_bytes: int = 0  # of these: read again by every token


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected of one pool size and profile."""

    hit_rate: float
    tokens_per_second: float
    compute_seconds: float  # per token, were everything there
    missed_bytes: float  # per token, of experts and of dense weights
    first_token_seconds: float  # of the prompt, from the request on
    is_disk_bound: bool


def hit_rate(profile: Profile, slots_per_layer: float, shape: Shape) -> float:
    """Share of expert uses that find their expert, with so many slots for each layer's experts."""
    share = slots_per_layer / shape.n_experts
    if share >= 1:
        return 1.0
    ratio = shape.n_experts / shape.n_active
    cycles = slots_per_layer / shape.n_active * (PROFILE_EXPERTS_PER_ACTIVE / ratio) ** 0.25
    return max(share, _interpolated(profile, cycles))


def forecasts(shape: Shape, measured: Measured, pool: Pool) -> dict[str, Forecast]:
    """With the routing of each profile, the expected one first."""
    slots_per_layer = pool.n_slots / shape.n_layers
    of_profiles = {
        name: hit_rate(profile, slots_per_layer, shape) for name, profile in PROFILES.items()
    }
    return {
        name: forecast(shape, measured, pool, pool.hit_share * hits)
        for name, hits in of_profiles.items()
    }


def forecast(shape: Shape, measured: Measured, pool: Pool, hits: float) -> Forecast:
    """The speed with this pool and hit rate, and the time to the first token of a prompt."""
    message = 0.0 if hits >= 1 else MESSAGE_SECONDS
    dense = measured.decode.dense_seconds / shape.n_layers
    expert = measured.decode.expert_seconds
    experts = 0.0
    for n_missing in range(shape.n_active + 1):
        wait = burst_seconds(measured, n_missing) + expert if n_missing else 0.0
        chance = _binomial(shape.n_active, n_missing, 1 - hits)
        experts += chance * max(shape.n_active * expert, wait)
    compute = shape.n_layers * (dense + shape.n_active * expert)
    token = shape.n_layers * (dense + message + experts)
    token += dense_seconds(shape, measured, pool.lost_bytes)
    return Forecast(
        hit_rate=hits,
        tokens_per_second=1 / token,
        compute_seconds=compute,
        missed_bytes=pool.lost_bytes
        + shape.n_layers * shape.n_active * (1 - hits) * shape.slab_bytes,
        first_token_seconds=prompt_seconds(shape, measured, pool),
        is_disk_bound=token > DISK_BOUND * compute,
    )


def start_seconds(shape: Shape, measured: Measured, *, preloads: bool) -> float:
    """From the command to the first request: processes, dense weights read one by one, and all
    experts where they all stay."""
    n_experts = shape.n_layers * shape.n_experts if preloads else 0
    weights = dense_seconds(shape, measured, shape.dense_bytes)
    return START_SECONDS + weights + burst_seconds(measured, n_experts)


def dense_seconds(shape: Shape, measured: Measured, n_bytes: int) -> float:
    """To read so much of the dense weights, while nothing is computed: one read at a time."""
    return n_bytes / shape.slab_bytes * measured.burst_seconds[1] if n_bytes else 0.0


def burst_seconds(measured: Measured, n_experts: float) -> float:
    """Of any number of experts read at once: between the measured ones, beyond at the same rate."""
    sizes = sorted(measured.burst_seconds)
    points = [(float(size), measured.burst_seconds[size]) for size in sizes]
    if n_experts >= points[-1][0]:
        return points[-1][1] * n_experts / points[-1][0]
    return _interpolated(((0.0, 0.0), *points), n_experts)


def prompt_seconds(shape: Shape, measured: Measured, pool: Pool) -> float:
    """Chunk by chunk, layer by layer: every expert that the chunk needs is read once while the
    others are computed. What a layer kept of the chunk before is not read again. Dense weights
    that are left to the page cache come with the first chunk."""
    kept = min(1.0, pool.n_slots / shape.n_layers / shape.n_experts)
    seconds, left = 0.0, pool.prompt_tokens
    is_first = True
    while left > 0:
        n_tokens = min(left, pool.chunk_tokens)
        # tokens of one text choose alike: N reach as many experts as N ** 3/4 that choose by chance
        # (the generator's routing: 42 of 64 for 16 tokens)
        by_chance = n_tokens**0.75
        reached = shape.n_experts * (1 - (1 - shape.n_active / shape.n_experts) ** by_chance)
        missing = reached if is_first and kept < 1 else reached * (1 - kept)
        dense, experts = _chunk_seconds(shape, measured, n_tokens, reached)
        reading = burst_seconds(measured, missing)
        seconds += shape.n_layers * (dense + max(experts, reading) + MESSAGE_SECONDS)
        mapped_bytes = pool.mapped_bytes if is_first else pool.lost_bytes
        seconds += dense_seconds(shape, measured, mapped_bytes)
        left -= n_tokens
        is_first = False
    return seconds


def _chunk_seconds(
    shape: Shape, measured: Measured, n_tokens: int, reached: float
) -> tuple[float, float]:
    """Of one layer: everything but the experts, and its experts; between one token and many, both
    grow by tokens and by experts as the two measurements say."""
    one, many = measured.decode, measured.prompt
    share = min(1.0, max(0.0, (n_tokens - 1) / max(1, many.n_tokens - 1)))
    scale = max(1.0, n_tokens / many.n_tokens)
    dense = (one.dense_seconds + share * (many.dense_seconds - one.dense_seconds)) * scale
    expert = (one.expert_seconds + share * (many.expert_seconds - one.expert_seconds)) * scale
    return dense / shape.n_layers, reached * expert


def _binomial(n: int, k: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]
