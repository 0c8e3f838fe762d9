"""`moe-coord plan`: what a run would do with memory and disk, and how fast; loads nothing.

Everything is that of the run: the same plan, reader, cores. Two short probes measure the disk and
the arithmetic (`probes`), `forecast` makes speeds of them, `advice` says what would help.
"""

import dataclasses
import json
from collections.abc import Iterator

from coordinator.command.commands import PlanCommand
from coordinator.command.flags import settings_of
from coordinator.command.signals import stop_signals
from coordinator.command.sizes import LARGEST_BYTES, format_size
from coordinator.plan.advice import advice
from coordinator.plan.budget import MemoryPlan
from coordinator.plan.expected_pool import expected_pool
from coordinator.plan.forecast import (
    Forecast,
    Measured,
    Pool,
    Shape,
    burst_seconds,
    forecast,
    forecasts,
    start_seconds,
)
from coordinator.plan.machine import Machine, read_machine
from coordinator.plan.memory_request import OnlySequence
from coordinator.plan.packing_gain import PACK, PackingGain, packing_gain
from coordinator.plan.probes import Record, compute_record, disk_record, measured_of
from coordinator.plan.resolve import memory_plan, spare_bytes
from coordinator.plan.setup import Setup, prepared
from coordinator.plan.traced_routing import TracedRouting, read_routing
from coordinator.processes.available_memory import AvailableMemory
from coordinator.processes.limits import ResourceError

TRACED = "recorded"  # the routing of --routing, beside the profiles
SWEEP = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # of the budget: what more or less memory would do


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What another budget would give."""

    budget_bytes: int
    pool_bytes: int
    n_slots: int
    forecasts: dict[str, Forecast]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """All that a plan says."""

    setup: Setup
    machine: Machine
    shape: Shape
    disk: Record
    compute: Record
    measured: Measured
    n_prompt: int
    row: Row
    packing: PackingGain | None  # None: packed, or nothing is read while it runs
    sweep: tuple[Row, ...]
    advice: tuple[str, ...]

    @property
    def first(self) -> Forecast:
        """What is expected: of the recorded routing, else of the likeliest profile."""
        return next(iter(self.row.forecasts.values()))

    @property
    def start_seconds(self) -> float:
        """From the command to the first request."""
        preloads = self.setup.plan.everything_fits
        return start_seconds(self.shape, self.measured, preloads=preloads)


def run_plan(command: PlanCommand) -> int:
    """Plan, measure, print; returns the exit code. Raises what `prepared` and the probes raise."""
    machine = read_machine()
    only = OnlySequence(command.n_prompt, command.n_prompt + command.n_answer)
    with prepared(command.config, machine, only) as setup, stop_signals() as stop:
        routing = None
        if command.routing is not None:
            routing = read_routing(command.routing, setup, command.n_answer)
        compute = compute_record(setup, machine.memory.n_bytes, command.probe_seconds, stop)
        if stop.exit_code is not None:
            return stop.exit_code
        disk = disk_record(setup, command.probe_seconds, compute, stop)
        if stop.exit_code is not None:
            return stop.exit_code
        found = _found(command, machine, setup, disk, compute, routing)
    print(json.dumps(as_json(found)) if command.json else "\n".join(lines(found)))
    return 0


def _found(
    command: PlanCommand,
    machine: Machine,
    setup: Setup,
    disk: Record,
    compute: Record,
    routing: TracedRouting | None,
) -> Found:
    slabs = setup.spec.slabs
    shape = Shape(
        n_layers=setup.spec.n_layers,
        n_experts=setup.spec.n_experts,
        n_active=setup.spec.n_active,
        slab_bytes=slabs.total_bytes // (len(slabs.layers) * slabs.n_experts),
        dense_bytes=setup.plan.dense_bytes,
    )
    measured = measured_of(disk, compute)

    def pool_of(plan: MemoryPlan) -> Pool:
        spare = spare_bytes(machine, plan)
        return expected_pool(setup.config, plan, setup.spec, spare, command.n_prompt)

    def row(plan: MemoryPlan) -> Row:
        pool = pool_of(plan)
        traced: dict[str, Forecast] = {}
        if routing is not None and setup.config.has_pool:
            traced = {TRACED: forecast(shape, measured, pool, routing.hits_in_pool(plan))}
        elif routing is not None:
            cached = routing.hits_in_page_cache(pool.n_slots * shape.slab_bytes)
            traced = {TRACED: forecast(shape, measured, pool, cached)}
        found = traced | forecasts(shape, measured, pool)
        return Row(plan.budget_bytes, plan.pool_bytes, pool.n_slots, found)

    own = row(setup.plan)
    packing = None
    if "packed_burst_s" in disk and setup.config.has_pool and not setup.plan.everything_fits:
        packed = measured_of(disk, compute, "packed_burst_s")
        pool = pool_of(setup.plan)
        after = {
            name: forecast(shape, packed, pool, each.hit_rate)
            for name, each in own.forecasts.items()
        }
        packing = packing_gain(measured, packed, shape.n_active, own.forecasts, after)
    available = machine.memory.n_bytes
    return Found(
        setup=setup,
        machine=machine,
        shape=shape,
        disk=disk,
        compute=compute,
        measured=measured,
        n_prompt=command.n_prompt,
        row=own,
        packing=packing,
        sweep=tuple(row(plan) for plan in _other_plans(command, machine, setup)),
        advice=(
            *advice(setup.config, setup.plan, setup.spec, available, own.forecasts),
            *([PACK] if packing is not None and packing.is_worth_it else []),
        ),
    )


def _other_plans(command: PlanCommand, machine: Machine, setup: Setup) -> Iterator[MemoryPlan]:
    """Plans for less and more memory than there is, up to the first that holds all experts. Where
    memory does not change the pool (the shipped model's), there is nothing to compare."""
    if not setup.config.has_pool:
        return
    only = OnlySequence(command.n_prompt, command.n_prompt + command.n_answer)
    endless = AvailableMemory(LARGEST_BYTES, "any machine")
    anywhere = dataclasses.replace(machine, memory=endless)
    for factor in SWEEP:
        budget = int(setup.plan.budget_bytes * factor)
        config = dataclasses.replace(command.config, memory_bytes=budget, pool=None)
        try:
            plan = memory_plan(config, anywhere, setup.spec, only)
        except ResourceError:
            continue  # too little for anything
        is_other = plan.everything_fits or plan.pool_bytes != setup.plan.pool_bytes
        if factor != 1 and not is_other:
            continue
        yield plan
        if plan.everything_fits:
            return


def lines(found: Found) -> Iterator[str]:
    """The plan for people."""
    setup, row, shape = found.setup, found.row, found.shape
    yield from setup.lines()
    machine = found.machine
    yield (
        f"machine: {len(machine.cores)} core(s), {machine.n_effective_cores} of them at once; "
        f"{format_size(machine.memory.n_bytes)} free ({machine.memory.source})"
    )
    n_active = shape.n_active
    rate = n_active * shape.slab_bytes / burst_seconds(found.measured, n_active)
    bursts = ", ".join(
        f"{size}: {1e3 * seconds:.1f} ms" for size, seconds in found.measured.burst_seconds.items()
    )
    yield (
        f"disk: {rate / 1e9:.2f} GB/s in bursts of {n_active} experts of "
        f"{format_size(shape.slab_bytes)}, {setup.reads_in_flight} read(s) in flight ({bursts})"
    )
    yield (
        f"arithmetic: {found.compute['kernels']}, {found.compute['threads']} thread(s): "
        f"{1e3 * found.first.compute_seconds:.1f} ms per token"
    )
    cycle = setup.plan.token_cycle_bytes
    cycles = row.n_slots / shape.n_layers / n_active
    yield f"token cycle: {format_size(cycle)}; the pool holds {cycles:.1f} of them"
    for index, (name, each) in enumerate(row.forecasts.items()):
        yield f"{'  or' if index else 'forecast'}, with {name} routing: {_spelled(each)}"
    yield (
        f"start: about {found.start_seconds:.1f} s; first token of a prompt of "
        f"{found.n_prompt} tokens: about "
        f"{found.first.first_token_seconds:.1f} s later"
    )
    for other in found.sweep:
        found_speeds = sorted(each.tokens_per_second for each in other.forecasts.values())
        speeds = " to ".join(f"{speed:.1f}" for speed in found_speeds)
        yield (
            f"  --memory {format_size(other.budget_bytes)}: pool {format_size(other.pool_bytes)}, "
            f"{speeds} tokens/s"
        )
    if found.packing is not None:
        yield found.packing.describe()
    for text in found.advice:
        yield f"advice: {text}"


def _spelled(each: Forecast) -> str:
    return (
        f"{each.tokens_per_second:.1f} tokens/s (hit rate {100 * each.hit_rate:.0f} %, "
        f"{each.missed_bytes / 1e6:.0f} MB read per token)"
    )


def as_json(found: Found) -> Record:
    """The same as one JSON object."""
    setup, plan, row = found.setup, found.setup.plan, found.row
    return {
        "model": str(setup.config.model),
        "settings": {**settings_of(setup.config), "reads_in_flight": setup.reads_in_flight},
        "machine": {
            "cores": list(found.machine.cores),
            "effective_cores": found.machine.n_effective_cores,
            "available_bytes": found.machine.memory.n_bytes,
            "available_source": found.machine.memory.source,
            "core_plan": str(setup.cores) if setup.cores else None,
        },
        "memory": {
            "budget_bytes": plan.budget_bytes,
            "source": plan.source,
            "processes_bytes": plan.processes_bytes,
            "page_table_bytes": plan.page_table_bytes,
            "dense_bytes": plan.dense_bytes,
            "kv_bytes": plan.kv_bytes,
            "scratch_bytes": plan.scratch_bytes,
            "pool_bytes": plan.pool_bytes,
            "total_bytes": plan.total_bytes,
            "context_tokens": plan.context_tokens,
            "chunk_tokens": plan.chunk_tokens,
            "slots": row.n_slots,
            "experts": plan.n_experts,
            "token_cycle_bytes": plan.token_cycle_bytes,
        },
        "disk": found.disk,
        "compute": found.compute,
        "expected": next(iter(row.forecasts)),
        "forecast": {name: dataclasses.asdict(each) for name, each in row.forecasts.items()},
        "packing": None if found.packing is None else found.packing.as_json(),
        "start_s": round(found.start_seconds, 3),
        "prompt_tokens": found.n_prompt,
        "sweep": [
            {
                "memory_bytes": other.budget_bytes,
                "pool_bytes": other.pool_bytes,
                "tok_s": {
                    name: round(each.tokens_per_second, 3) for name, each in other.forecasts.items()
                },
            }
            for other in found.sweep
        ],
        "advice": list(found.advice),
    }
