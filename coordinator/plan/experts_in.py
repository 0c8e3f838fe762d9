"""Where experts that stay for good lie: in the pool, or in compute's own memory. Pure.

Compute's own memory has huge pages, which are read faster than a pool that has none; whether it is
so, only a trial tells (`compute_worker.memory_trial`). Whether there may be one is decided here.
"""

from compute_worker.arch import ModelSpec
from coordinator.command.config import Config
from coordinator.command.sizes import format_size
from coordinator.plan.budget import MemoryPlan
from coordinator.plan.footprint import table_bytes
from coordinator.processes.limits import ResourceError

# what is held twice while experts move: a part of a layer and the ends of its huge pages, or the
# buffer of the trial
ROOM_BYTES = 64 << 20
WORTH_A_TRIAL_BYTES = 256 << 20  # fewer bytes of experts stay in large caches


def experts_in(config: Config, plan: MemoryPlan, spec: ModelSpec) -> str:
    """ "pool", "own", "none" where there is no pool, or "auto": compute measures what is better.

    Raises `ResourceError` where "own" was asked for and cannot be.
    """
    if not config.has_pool:
        return "none"
    if config.experts_in == "pool":
        return "pool"
    n_bytes = spec.slabs.total_bytes
    needed = plan.total_bytes + min(ROOM_BYTES, n_bytes) + table_bytes(n_bytes)
    fits = plan.everything_fits and needed <= plan.budget_bytes
    if config.experts_in == "own":
        if not fits:
            raise ResourceError(
                f"--experts-in: expected room for all {plan.n_experts} experts, and for "
                f"{format_size(ROOM_BYTES)} while they move, with own; found a pool for "
                f"{plan.layout.n_slots} and {format_size(plan.total_bytes)} used of "
                f"{format_size(plan.budget_bytes)}; give more --memory, or drop --experts-in"
            )
        return "own"
    sends_needs = config.usage is not None or config.trace is not None
    return "auto" if fits and not sends_needs and n_bytes >= WORTH_A_TRIAL_BYTES else "pool"
