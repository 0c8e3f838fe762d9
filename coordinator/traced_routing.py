"""Hits that a recorded routing would have had in the pool of a plan.

The run's policy is replayed over a trace of the same model, so what a plan expects does not rest on
a guess of how concentrated the routing of a text is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.budget import MemoryPlan
from coordinator.flag_values import ConfigError
from coordinator.geometry import pool_geometry
from coordinator.policies import Key, PolicyGeometry
from coordinator.policy_choice import make_policy
from coordinator.replay import replay
from coordinator.replay_limits import page_cache
from coordinator.setup import Setup
from coordinator.trace_file import Trace, read_trace
from io_worker.slabs import SlabTable


@dataclass(frozen=True, slots=True)
class TracedRouting:
    """A trace, and the policy with the counts that it begins with."""

    trace: Trace
    slabs: SlabTable
    policy: str
    counts: Mapping[Key, float]

    def hits_in_pool(self, plan: MemoryPlan) -> float:
        """Hit rate of the decode steps in the plan's pool."""
        geometry = pool_geometry(self.slabs, plan.layout, plan.class_of_layer)
        shape = PolicyGeometry(geometry.class_of_layer, geometry.slots_of_class)
        policy = make_policy(self.policy, shape, self.counts, self.trace.header.n_active)
        return replay(self.trace.needs, geometry, policy).decode.hit_rate

    def hits_in_page_cache(self, n_bytes: int) -> float:
        """The same where the page cache keeps the experts, in so many bytes."""
        slab_bytes = {layer.layer: layer.slab_bytes for layer in self.slabs.layers}
        return page_cache(self.trace.needs, slab_bytes, n_bytes).decode.hit_rate


def read_routing(path: Path, setup: Setup) -> TracedRouting:
    """The routing in a trace of the model of this run. Raises `ConfigError`."""
    trace = read_trace(path)
    if trace.header.fingerprint != setup.model.fingerprint:
        raise ConfigError(
            f"--routing: expected a trace of this model ({setup.model.fingerprint}), found one of "
            f"{trace.header.fingerprint} in {str(path)!a:.200}; record one with --trace"
        )
    return TracedRouting(trace, setup.spec.slabs, setup.config.policy, setup.usage.counts)
