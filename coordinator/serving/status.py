"""The status of a running service as one JSON object: what a page and a terminal show.

Read in the loop when somebody looks, from plain state; costs nothing when nobody does. Served as
``GET /status.json``. Times are seconds, sizes bytes, counters totals since the start; null means
"not known". The shape::

    version          "0.1.0"
    state            "starting" | "ready" | "degraded" | "draining"
    uptime_seconds   since the service began to start
    model            name, architecture, n_layers, n_experts (per layer), n_active, n_context
    settings         io_workers, io_threads, reader, policy, prefetch, numerics, kernels (null until
                     compute has started), kv_type, parallel, queue
    recent           the last 10 s or less: seconds (its length), tokens_per_second (drawn),
                     prompt_tokens_per_second, hit_rate (0..1 or null), mib_per_token (read, of
                     prompt and drawn tokens; null without a token), and token_seconds: wall time
                     per drawn token as {compute, disk, coordination} (null without a token)
    totals           prompt_tokens, generated_tokens, expert_requests, expert_hits (or null),
                     bytes_read, evictions, requests: {eos, length, stop, cancelled, error},
                     and seconds: {prompt: {compute, disk, coordination}, decode: {the same}}
    slots            a list, one entry per class of equal slabs: slot_bytes, layers (a list), and
                     how many are free, loading, ready, condemned, retired, and how many of the
                     ready ones are in_use by the running step; empty without a pool
    experts          null without a pool, else
                       layers: numbers of the model's layers that have experts, in order
                       states: a text per layer, a letter per expert:
                               "." on the disk, "l" loading, "r" resident
                       uses:   a list per layer, tokens that used each expert so far
    processes        a list: name ("coordinator", "compute", "io0", …, "http"), pid (null while it
                     is down), is_up, cores (a list), resident_bytes, cpu_seconds (both null while
                     it is down), restarts
    memory           budget_bytes, accounted_bytes, peak_bytes, parts: {processes, page_tables,
                     dense, kv, scratch, pool} as planned, pool_bytes (held now; it shrinks when
                     others take the memory), kv: {blocks, kept_blocks, block_tokens}
    requests         running, queued, parallel, queue, and list: one entry per request, oldest
                     first: phase ("queued" | "prompt" | "decode"), prompt_tokens, done_tokens
                     (of the prompt), tokens (drawn), seconds (since it came)
"""

import json
import os
from collections import Counter
from typing import Any

from compute_worker.arch import KV_BLOCK_TOKENS
from coordinator.core.request import Phase
from coordinator.core.residency import Residency
from coordinator.core.slots import SlotState
from coordinator.metrics.exposition import measure
from coordinator.metrics.scrape import COORDINATOR, RunView
from coordinator.plan.setup import Setup
from coordinator.processes.engine import Engine
from coordinator.processes.launch import HTTP
from coordinator.serving.answers import RunningAnswer
from coordinator.serving.rates import Rates
from coordinator.serving.service_setup import model_names

LETTERS = {SlotState.LOADING: "l", SlotState.READY: "r", SlotState.CONDEMNED: "l"}


class StatusReport:
    """Makes snapshots of one run."""

    def __init__(self, engine: Engine, setup: Setup, run: RunView) -> None:
        self._engine = engine
        self._setup = setup
        self._run = run

    def snapshot(
        self, now_ns: int, state: str, rates: Rates, answers: dict[int, RunningAnswer]
    ) -> str:
        """The status as JSON text. `answers` are the running requests by number of the core."""
        return json.dumps(
            {
                "version": self._run.version,
                "state": state,
                "uptime_seconds": round((now_ns - rates.started_ns) / 1e9, 3),
                "model": self._model(),
                "settings": self._settings(),
                "recent": rates.recent(),
                "totals": self._totals(),
                "slots": self._slots(),
                "experts": self._experts(),
                "processes": self._processes(),
                "memory": self._memory(),
                "requests": self._requests(now_ns, answers),
            },
            separators=(",", ":"),
        )

    def _model(self) -> dict[str, Any]:
        spec = self._setup.spec
        return {
            "name": model_names(self._setup)[0],
            "architecture": spec.arch,
            "n_layers": spec.n_layers,
            "n_experts": spec.n_experts,
            "n_active": spec.n_active,
            "n_context": self._setup.plan.context_tokens,
        }

    def _settings(self) -> dict[str, Any]:
        config = self._setup.config
        return {
            "io_workers": config.io_workers,
            "io_threads": config.io_threads,
            "reader": self._run.reader,
            "policy": config.policy,
            "prefetch": config.prefetch,
            "numerics": config.numerics,
            "kernels": self._run.kernels(),
            "kv_type": config.kv_type,
            "parallel": config.parallel,
            "queue": config.queue,
        }

    def _totals(self) -> dict[str, Any]:
        totals, residency = self._run.totals, self._engine.core.residency
        counters = residency.counters
        hits = counters.hits + totals.standing_uses if residency.knows_hits else None
        return {
            "prompt_tokens": totals.prompt_tokens,
            "generated_tokens": totals.generated_tokens,
            "expert_requests": counters.requests + totals.standing_uses,
            "expert_hits": hits,
            "bytes_read": counters.bytes_read,
            "evictions": counters.evictions,
            "requests": dict(totals.requests),
            "seconds": {
                phase: {
                    "compute": steps.compute_ns / 1e9,
                    "disk": steps.wait_disk_ns / 1e9,
                    "coordination": steps.coordination_ns / 1e9,
                }
                for phase, steps in totals.phases.items()
            },
        }

    def _slots(self) -> list[dict[str, Any]]:
        residency = self._engine.core.residency
        counts = Counter((slot.slot_class, slot.state) for slot in residency.slots.slots)
        in_use = Counter(slot.slot_class for slot in residency.slots.slots if slot.pins)
        layers: dict[int, list[int]] = {}
        for layer, slot_class in residency.geometry.class_of_layer.items():
            layers.setdefault(slot_class, []).append(layer)
        return [
            {
                "slot_bytes": found.slot_bytes,
                "layers": layers.get(number, []),
                **{state.value: counts[number, state] for state in SlotState},
                "in_use": in_use[number],
            }
            for number, found in enumerate(self._setup.plan.layout.classes)
        ]

    def _experts(self) -> dict[str, Any] | None:
        residency = self._engine.core.residency
        if not isinstance(residency, Residency):
            return None
        layers = list(residency.geometry.class_of_layer)
        letters = {
            slot.key: LETTERS[slot.state] for slot in residency.slots.slots if slot.key is not None
        }
        experts = range(residency.geometry.n_experts)
        return {
            "layers": layers,
            "states": [
                "".join([letters.get((layer, e), ".") for e in experts]) for layer in layers
            ],
            "uses": [[residency.uses[layer, e] for e in experts] for layer in layers],
        }

    def _processes(self) -> list[dict[str, Any]]:
        return [self._process(name) for name in (COORDINATOR, *self._engine.names)]

    def _process(self, name: str) -> dict[str, Any]:
        child = self._engine.children.get(name)
        pid = os.getpid() if name == COORDINATOR else child.process.pid if child else None
        use = measure(pid) if pid is not None else None
        return {
            "name": name,
            "pid": pid,
            "is_up": name == COORDINATOR or self._engine.is_up(name),
            "cores": list(self._cores_of(name, pid)),
            "resident_bytes": use.resident_bytes if use else None,
            "cpu_seconds": use.used.user_seconds + use.used.system_seconds if use else None,
            "restarts": self._engine.restarts.counts[name],
        }

    def _cores_of(self, name: str, pid: int | None) -> tuple[int, ...]:
        """As planned; without a plan as the system says."""
        plan = self._setup.cores
        if plan is not None:
            role = name if name in (COORDINATOR, HTTP, "compute") else "io"
            return plan.cores_of(role)
        try:
            return tuple(sorted(os.sched_getaffinity(pid))) if pid is not None else ()
        except ProcessLookupError:
            return ()

    def _memory(self) -> dict[str, Any]:
        plan, memory = self._setup.plan, self._engine.memory
        return {
            "budget_bytes": plan.budget_bytes,
            "accounted_bytes": memory.accounted_bytes,
            "peak_bytes": memory.peak_bytes,
            "parts": {
                "processes": plan.processes_bytes,
                "page_tables": plan.page_table_bytes,
                "dense": plan.dense_bytes,
                "kv": plan.kv_bytes,
                "scratch": plan.scratch_bytes,
                "pool": plan.pool_bytes,
            },
            "pool_bytes": memory.pool_bytes,
            "kv": {
                "blocks": plan.n_kv_blocks,
                "kept_blocks": self._engine.core.requests.n_kept_blocks,
                "block_tokens": KV_BLOCK_TOKENS,
            },
        }

    def _requests(self, now_ns: int, answers: dict[int, RunningAnswer]) -> dict[str, Any]:
        config, found = self._setup.config, []
        for number, answer in answers.items():
            request = self._engine.core.requests.of(number)
            if request is not None:
                found.append(
                    {
                        "phase": request.phase.value,
                        "prompt_tokens": request.n_prompt,
                        "done_tokens": min(request.n_done, request.n_prompt),
                        "tokens": len(request.tokens),
                        "seconds": round((now_ns - answer.submitted_ns) / 1e9, 3),
                    }
                )
        n_queued = sum(1 for entry in found if entry["phase"] == Phase.QUEUED.value)
        return {
            "running": len(found) - n_queued,
            "queued": n_queued,
            "parallel": config.parallel,
            "queue": config.queue,
            "list": found,
        }
