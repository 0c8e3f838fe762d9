"""Hits that a recorded routing would have had in the pool of a plan.

The run's policy is replayed over a trace of the same model, so what a plan expects does not rest on
a guess of how concentrated the routing of a text is. The longer an answer, the more experts it
uses, so only as much of the trace counts as the planned answer has tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.command.flag_values import ConfigError
from coordinator.core.geometry import pool_geometry
from coordinator.core.policies import Key, PolicyGeometry
from coordinator.core.policy_choice import make_policy
from coordinator.plan.budget import MemoryPlan
from coordinator.plan.setup import Setup
from coordinator.routing.replay import replay
from coordinator.routing.replay_limits import page_cache
from coordinator.routing.trace_file import Trace, is_prompt, of_steps, read_trace
from io_worker.slabs import SlabTable
from shm.messages import Need


@dataclass(frozen=True, slots=True)
class TracedRouting:
    """The beginning of a trace, and the policy with the counts that it begins with."""

    needs: tuple[Need, ...]
    n_active: int
    slabs: SlabTable
    policy: str
    counts: Mapping[Key, float]

    def hits_in_pool(self, plan: MemoryPlan) -> float:
        """Hit rate of the decode steps in the plan's pool."""
        geometry = pool_geometry(self.slabs, plan.layout, plan.class_of_layer)
        shape = PolicyGeometry(geometry.class_of_layer, geometry.slots_of_class)
        policy = make_policy(self.policy, shape, self.counts, self.n_active)
        return replay(self.needs, geometry, policy).decode.hit_rate

    def hits_in_page_cache(self, n_bytes: int) -> float:
        """The same where the page cache keeps the experts, in so many bytes."""
        slab_bytes = {layer.layer: layer.slab_bytes for layer in self.slabs.layers}
        return page_cache(self.needs, slab_bytes, n_bytes).decode.hit_rate


def read_routing(path: Path, setup: Setup, n_answer: int) -> TracedRouting:
    """The routing in a trace of the model of this run, of its prompts and so many tokens more.

    Raises `ConfigError`.
    """
    trace = read_trace(path)
    if trace.header.fingerprint != setup.model.fingerprint:
        raise ConfigError(
            f"--routing: expected a trace of this model ({setup.model.fingerprint}), found one of "
            f"{trace.header.fingerprint} in {str(path)!a:.200}; record one with --trace"
        )
    return TracedRouting(
        tuple(_beginning(trace, n_answer)),
        trace.header.n_active,
        setup.spec.slabs,
        setup.config.policy,
        setup.usage.counts,
    )


def _beginning(trace: Trace, n_decode_steps: int) -> Iterator[Need]:
    n_left = n_decode_steps
    for step in of_steps(trace.needs):
        if not is_prompt(step[0]):
            n_left -= 1
        if n_left < 0:
            return
        yield from step
