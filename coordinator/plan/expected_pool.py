"""What a planned run will have in memory of the weights, for the forecast. Pure.

The page cache is whatever memory is left beside the plan. Dense weights in it are used by every
token, so they stay before experts do; they are gone through in the same order by every token, and
of what is larger than the cache the rest is read each time.
"""

from compute_worker.arch import ModelSpec, dense_bytes
from coordinator.command.config import Config
from coordinator.plan.budget import MemoryPlan
from coordinator.plan.forecast import Pool


def expected_pool(
    config: Config, plan: MemoryPlan, spec: ModelSpec, spare_bytes: int, prompt_tokens: int
) -> Pool:
    """The pool of a plan, or what the page cache can hold in its place."""
    mapped_bytes = dense_bytes(spec) - plan.dense_bytes if plan.maps_dense else 0
    n_slots = plan.layout.n_slots
    if not config.has_pool:
        slab_bytes = spec.slabs.total_bytes // plan.n_experts
        n_slots = min(plan.n_experts, max(0, spare_bytes - mapped_bytes) // slab_bytes)
    return Pool(
        n_slots=n_slots,
        chunk_tokens=plan.chunk_tokens,
        prompt_tokens=prompt_tokens,
        hit_share=_hit_share(config, plan),
        mapped_bytes=mapped_bytes,
        lost_bytes=max(0, mapped_bytes - spare_bytes),
    )


def _hit_share(config: Config, plan: MemoryPlan) -> float:
    """A plain LRU evicts what a token used before the next one comes to it, in the layers whose
    slots do not hold what one token uses of them."""
    if not config.has_pool or config.policy != "lru":
        return 1.0
    return 1 - plan.n_layers_below_cycle / len(plan.class_of_layer)
