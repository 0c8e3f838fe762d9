"""`moe-coord replay`: hits of every policy at every size over a recorded routing, with the limits.

Two rows are no policies: `belady` knows what comes and cannot be beaten; `page cache` keeps what
was used last, page by page, in as many bytes as the pool has.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import PoolSize, format_size
from coordinator.command.tables import console_on, print_table
from coordinator.command.trace_commands import ReplayCommand
from coordinator.core.geometry import PoolGeometry, pool_geometry
from coordinator.core.policies import Key, PolicyGeometry
from coordinator.core.policy_choice import make_policy
from coordinator.core.slot_classes import PoolTooSmallError, pool_layout, whole_pool_bytes
from coordinator.routing.imatrix import read_imatrix
from coordinator.routing.replay import Outcome, replay
from coordinator.routing.replay_limits import belady, page_cache, preloaded
from coordinator.routing.trace_file import Trace, is_prompt, read_trace
from coordinator.routing.usage import UsageCounts, read_hot_set
from shm.pool import PoolLayout

MiB = 1024 * 1024
NEED_COUNTS = {"static": "hot set", "imatrix": "imatrix"}  # policies that nothing else feeds


@dataclass(frozen=True, slots=True)
class Pool:
    """One size of the pool, cut into slots as a run would cut it."""

    name: str
    n_bytes: int
    layout: PoolLayout
    geometry: PoolGeometry

    @property
    def slots_of_class(self) -> tuple[int, ...]:
        """Slots of each class."""
        return tuple(slot_class.n_slots for slot_class in self.layout.classes)


@dataclass(frozen=True, slots=True)
class Result:
    """What one policy did in one pool."""

    policy: str
    pool: Pool
    outcome: Outcome


def show_replay(command: ReplayCommand, output: TextIO | None) -> None:
    """Print it (None: to a closed standard output). Raises `ConfigError`, `PoolTooSmallError`."""
    trace = read_trace(command.trace)
    counts = _counts(command, trace)
    pools, too_small = _pools(trace, command.pools)
    policies = [name for name in command.policies if name in counts]
    if not policies:
        wanted = ", ".join(command.policies)
        raise ConfigError(
            f"--policy: expected counts for {wanted}, found none; give --hot-set or --imatrix"
        )
    results = [result for pool in pools for result in results_of(trace, pool, policies, counts)]
    if output is None:
        return
    if command.json:
        print(json.dumps(_record(command, trace, pools, results)), file=output)
        return
    _draw(trace, pools, results, output)
    for size in too_small:
        print(f"{size} is less than two slots: left out", file=output)


def _pools(trace: Trace, sizes: Sequence[PoolSize]) -> tuple[list[Pool], list[PoolSize]]:
    """Those that can be, and the sizes that cannot; raises `PoolTooSmallError` if none can."""
    pools, too_small = [], []
    for size in sizes:
        try:
            pools.append(pool_for(trace, size))
        except PoolTooSmallError:
            if size is sizes[-1] and not pools:
                raise
            too_small.append(size)
    return pools, too_small


def pool_for(trace: Trace, size: PoolSize) -> Pool:
    """The pool that a run with `--pool SIZE` gets. Raises `PoolTooSmallError`."""
    slabs = trace.header.slab_table()
    n_bytes = size.bytes_of(whole_pool_bytes(slabs))
    layout, classes = pool_layout(slabs, trace.header.n_active, n_bytes)
    return Pool(str(size), n_bytes, layout, pool_geometry(slabs, layout, classes))


def results_of(
    trace: Trace, pool: Pool, policies: list[str], counts: Mapping[str, Mapping[Key, float]]
) -> Iterator[Result]:
    """The limits, then every policy."""
    geometry, needs = pool.geometry, trace.needs
    slabs = {layer.layer: layer.slab_bytes for layer in trace.header.slab_table().layers}
    if geometry.holds_everything:
        limit = cached = preloaded(needs)
    else:
        limit = belady(needs, geometry.class_of_layer, pool.slots_of_class, slabs)
        cached = page_cache(needs, slabs, pool.n_bytes)
    yield Result("belady", pool, limit)
    yield Result("page cache", pool, cached)
    for name in policies:
        shape = PolicyGeometry(geometry.class_of_layer, pool.slots_of_class)
        policy = make_policy(name, shape, counts[name], trace.header.n_active)
        yield Result(name, pool, replay(needs, geometry, policy))


def _counts(command: ReplayCommand, trace: Trace) -> dict[str, Mapping[Key, float]]:
    """What each policy begins with; one that is missing here cannot take part."""
    sources: dict[str, Mapping[Key, float]] = {}
    for name, path, read in (
        ("hot set", command.hot_set, read_hot_set),
        ("imatrix", command.imatrix, read_imatrix),
    ):
        if path is not None:
            sources[name] = read(path, _fresh(trace)).counts
    counts = {}
    for policy in command.policies:
        source = NEED_COUNTS.get(policy)
        if source is None:
            counts[policy] = sources.get("hot set", {})
        elif source in sources:
            counts[policy] = sources[source]
    return counts


def _fresh(trace: Trace) -> UsageCounts:
    header = trace.header
    return UsageCounts(header.fingerprint, max(header.layers) + 1, header.n_experts)


def _record(
    command: ReplayCommand, trace: Trace, pools: list[Pool], results: list[Result]
) -> dict[str, Any]:
    return {
        "trace": str(command.trace),
        "fingerprint": trace.header.fingerprint,
        "steps": trace.n_steps,
        "decode_steps": n_decode_steps(trace),
        "pools": [
            {"asked": pool.name, "bytes": pool.n_bytes, "slots_of_class": pool.slots_of_class}
            for pool in pools
        ],
        "results": [
            {
                "policy": result.policy,
                "pool": result.pool.name,
                "requests": result.outcome.all.requests,
                "hits": result.outcome.all.hits,
                "missed_bytes": result.outcome.all.missed_bytes,
                "decode_requests": result.outcome.decode.requests,
                "decode_hits": result.outcome.decode.hits,
                "decode_missed_bytes": result.outcome.decode.missed_bytes,
                "first_8_decode_hit_rate": round(result.outcome.first.hit_rate, 6),
            }
            for result in results
        ],
    }


def n_decode_steps(trace: Trace) -> int:
    """Steps of a trace that are no part of a prompt."""
    return len({need.step for need in trace.needs if not is_prompt(need)})


def _draw(trace: Trace, pools: list[Pool], results: list[Result], output: TextIO) -> None:
    console, n_steps = console_on(output), n_decode_steps(trace)
    head = ["", *[_title(pool) for pool in pools]]

    def table(title: str, cell: Callable[[Outcome], str]) -> None:
        rows: dict[str, list[str]] = {}
        for result in results:
            rows.setdefault(result.policy, [result.policy]).append(cell(result.outcome))
        print_table(console, title, head, list(rows.values()))

    table(
        f"hits of {results[0].outcome.all.requests} requests, and their share in %",
        lambda found: f"{found.all.hits} {100 * found.all.hit_rate:5.1f}",
    )
    table(
        f"hit rate of the {n_steps} decode steps in %, and of the first 8 after a prompt",
        lambda found: f"{100 * found.decode.hit_rate:.1f} {100 * found.first.hit_rate:5.1f}",
    )
    table(
        "MiB missed per decode step",
        lambda found: f"{found.decode.missed_bytes / MiB / max(1, n_steps):.2f}",
    )


def _title(pool: Pool) -> str:
    """What was asked for, and the slots that came of it."""
    asked = pool.name if pool.name.endswith("%") else format_size(pool.n_bytes)
    return f"{asked}: {pool.layout.n_slots} slots"
