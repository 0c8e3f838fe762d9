"""The series that Prometheus sees, each declared once: name, kind, help, labels, whose, where from.

A series belongs to one part of the program, `whose`: it is shown by the targets of the processes
that play this part. Values are read from plain state at the moment of a scrape.
``deploy/METRICS.md`` is printed from this table by ``tests/metrics_table.py``. Knows no library of
Prometheus.

Rules to keep: `moe_coord_` before and base units in every name; no label whose values are not a
small fixed set, so none per expert, request or prompt.
"""

from collections.abc import Callable, Iterable, Mapping

from coordinator.core.slots import SlotState
from coordinator.metrics.one_series import Sample, Series, Value, by_name, one
from coordinator.metrics.scrape import ProcessUse, RunView, Scrape, Used


def _build(scrape: Scrape) -> list[Sample]:
    run = scrape.run
    kernels = run.kernels()
    return [((run.version, kernels, run.reader, run.policy), 1)] if kernels is not None else []


def _slots(scrape: Scrape) -> dict[str, Value]:
    states = [slot.state for slot in scrape.run.core.residency.slots.slots]
    return {state.value: states.count(state) for state in SlotState}


def _expert_requests(scrape: Scrape) -> dict[str, Value]:
    residency = scrape.run.core.residency
    if not residency.knows_hits:  # the page cache does not tell
        return {}
    counters = residency.counters
    return {"hit": counters.hits + scrape.run.totals.standing_uses, "miss": counters.misses}


def _budget(scrape: Scrape) -> dict[str, Value]:
    plan = scrape.run.plan
    return {
        "processes": plan.processes_bytes,
        "page_tables": plan.page_table_bytes,
        "dense": plan.dense_bytes,
        "kv": plan.kv_bytes,
        "scratch": plan.scratch_bytes,
        "pool": plan.pool_bytes,
    }


def _token_time(scrape: Scrape) -> Iterable[Sample]:
    for phase, steps in scrape.run.totals.phases.items():
        yield (phase, "compute"), steps.compute_ns / 1e9
        yield (phase, "disk"), steps.wait_disk_ns / 1e9
        yield (phase, "coordination"), steps.coordination_ns / 1e9


def _of_workers(read: Callable[[RunView, str], Value]) -> Callable[[Scrape], Iterable[Sample]]:
    """A series with the label `worker` of all processes but the coordinator."""
    return lambda scrape: [((name,), read(scrape.run, name)) for name in scrape.run.workers]


def _used(read: Callable[[Used], Mapping[str, Value]]) -> Callable[[Scrape], Iterable[Sample]]:
    """A series with one label, of the kernel's totals."""
    return by_name(lambda scrape: read(scrape.use.used) if scrape.use else {})


def _use(read: Callable[[ProcessUse], Value]) -> Callable[[Scrape], Iterable[Sample]]:
    """A series without labels, of what the kernel says of now."""
    return lambda scrape: [((), read(scrape.use))] if scrape.use else []


SERIES: tuple[Series, ...] = (
    Series(
        "build_info", "gauge", "coordinator",
        "Always 1; the labels say what runs. Absent until the compute process has started.",
        ("version", "kernels", "reader", "policy"), _build,
    ),
    Series(
        "tokens", "counter", "coordinator",
        "Tokens that were computed as part of a prompt (prompt) or drawn (generated).",
        ("kind",),
        by_name(lambda s: {
            "prompt": s.run.totals.prompt_tokens, "generated": s.run.totals.generated_tokens,
        }),
    ),
    Series(
        "requests", "counter", "coordinator",
        "Requests that are over, by what ended them: eos, length, stop, cancelled, error.",
        ("reason",), by_name(lambda s: s.run.totals.requests),
    ),
    Series(
        "requests_running", "gauge", "coordinator",
        "Requests that are being computed.", (), one(lambda s: s.run.totals.n_running),
    ),
    Series(
        "expert_requests", "counter", "coordinator",
        "Experts that layers asked for: in memory (hit), or to be read (miss).",
        ("result",), by_name(_expert_requests),
    ),
    Series(
        "slots", "gauge", "coordinator",
        "Places for experts in the pool: free, loading, ready, condemned (their reader is being "
        "killed), retired (memory given back) or adopted (compute has a copy of its own).",
        ("state",), by_name(_slots),
    ),
    Series(
        "evictions", "counter", "coordinator",
        "Experts that gave their slot to another.",
        (), one(lambda s: s.run.core.residency.counters.evictions),
    ),
    Series(
        "slots_lost", "counter", "coordinator",
        "Slots of the pool that something wrote over; they were read again.",
        (), one(lambda s: s.run.core.residency.counters.slots_lost),
    ),
    Series(
        "prefetch_issued", "counter", "coordinator",
        "Experts that were read ahead on a guess; 0 while prefetch is off.",
        (), one(lambda s: s.run.core.residency.prefetch.counters.issued),
    ),
    Series(
        "prefetch_used", "counter", "coordinator",
        "Experts read ahead that were needed then.",
        (), one(lambda s: s.run.core.residency.prefetch.counters.used),
    ),
    Series(
        "prefetch_wasted", "counter", "coordinator",
        "Experts read ahead that were evicted before they were needed.",
        (), one(lambda s: s.run.core.residency.prefetch.counters.wasted),
    ),
    Series(
        "stale_answers", "counter", "coordinator",
        "Answers of readers that came too late or twice and were dropped.",
        (), one(lambda s: s.run.core.residency.counters.stale_answers),
    ),
    Series(
        "restarts", "counter", "coordinator",
        "Starts of a worker after its first.",
        ("worker",), _of_workers(lambda run, name: run.n_restarts(name)),
    ),
    Series(
        "worker_up", "gauge", "coordinator",
        "1 while a worker is ready, 0 while it is dead or starts.",
        ("worker",), _of_workers(lambda run, name: int(run.life_of(name) is not None)),
    ),
    Series(
        "budget_bytes", "gauge", "coordinator",
        "What the memory plan gives to processes, page_tables, dense, kv, scratch and pool.",
        ("part",), by_name(_budget),
    ),
    Series(
        "budget_limit_bytes", "gauge", "coordinator",
        "What all processes together may use.", (), one(lambda s: s.run.plan.budget_bytes),
    ),
    Series(
        "accounted_bytes", "gauge", "coordinator",
        "What all processes use: anonymous memory, page tables, and the pool once.",
        (), one(lambda s: s.run.accounted_bytes()[0]),
    ),
    Series(
        "accounted_peak_bytes", "gauge", "coordinator",
        "The most that all processes used at once, measured twice a second.",
        (), one(lambda s: s.run.accounted_bytes()[1]),
    ),
    Series(
        "steps", "counter", "compute",
        "Steps computed: a part of a prompt (prompt), or a token of each running answer (decode).",
        ("phase",),
        by_name(lambda s: {name: steps.steps for name, steps in s.run.totals.phases.items()}),
    ),
    Series(
        "token_time_seconds", "counter", "compute",
        "Wall time of steps: arithmetic and all else (compute), waiting for reads (disk), waiting "
        "for the coordinator (coordination).",
        ("phase", "part"), _token_time,
    ),
    Series(
        "layer_requests", "counter", "compute",
        "Layers that asked the coordinator for experts, one message each.",
        (), one(lambda s: s.run.core.residency.n_needs),
    ),
    Series(
        "read_bytes", "counter", "readers",
        "Bytes read from the model: of the experts (slab), and what alignment added (over_read).",
        ("kind",),
        by_name(lambda s: {"slab": s.reader.bytes_read, "over_read": s.reader.bytes_over_read}),
    ),
    Series(
        "read_seconds", "histogram", "readers",
        "Time to read one expert: first byte asked for to last byte there.",
        (), one(lambda s: s.reader.latency),
    ),
    Series(
        "read_wait_seconds", "histogram", "readers",
        "Time in queues: from a layer's request for an expert to the first byte asked for.",
        (), one(lambda s: s.reader.wait),
    ),
    Series(
        "reads_in_flight", "gauge", "readers",
        "Experts that the reader was told to read and has not answered for.",
        (), one(lambda s: len(s.reader.wanted_ns)),
    ),
    Series(
        "reads_failed", "counter", "readers",
        "Experts that could not be read.", (), one(lambda s: s.reader.reads_failed),
    ),
    Series(
        "http_requests", "counter", "http",
        "Answers by route and status; 499 is a client that left before its answer began.",
        ("route", "status"),
        lambda s: [((route, str(status)), n) for (route, status), n in s.http.answers.items()],
    ),
    Series(
        "http_requests_in_flight", "gauge", "http",
        "Requests whose answer is not complete.", (), one(lambda s: s.http.in_flight),
    ),
    Series(
        "http_requests_queued", "gauge", "http",
        "Requests that no step has worked on yet.", (), one(lambda s: s.http.n_queued),
    ),
    Series(
        "http_first_token_seconds", "histogram", "http",
        "Time from a request to the first token of its answer, with its wait in the queue.",
        (), one(lambda s: s.http.first_token),
    ),
    Series(
        "http_next_token_seconds", "histogram", "http",
        "Time from one token of an answer to the next.", (), one(lambda s: s.http.next_token),
    ),
    Series(
        "kv_blocks", "gauge", "coordinator",
        "Blocks of 64 tokens in the KV cache: that there are (all), and that ended sequences left "
        "for those which begin like them (kept).",
        ("kind",),
        by_name(lambda s: {
            "all": s.run.plan.n_kv_blocks, "kept": s.run.core.requests.n_kept_blocks,
        }),
    ),
    Series(
        "process_resident_bytes", "gauge", "all",
        "Resident memory, with what is shared (the pool counts in every process that maps it).",
        (), _use(lambda use: use.resident_bytes),
    ),
    Series(
        "process_locked_bytes", "gauge", "all",
        "Memory that cannot be swapped out (mlock).",
        (), _use(lambda use: use.locked_bytes),
    ),
    Series(
        "process_cpu_seconds", "counter", "all",
        "Processor time (user, system), over all lives of the process.",
        ("mode",),
        _used(lambda used: {"user": used.user_seconds, "system": used.system_seconds}),
    ),
    Series(
        "process_page_faults", "counter", "all",
        "Page faults over all lives of the process; a major one waited for a disk.",
        ("kind",), _used(lambda used: {"major": used.major_faults, "minor": used.minor_faults}),
    ),
    Series(
        "process_context_switches", "counter", "all",
        "Times that its main thread gave its core up (voluntary) or had to (involuntary).",
        ("kind",),
        _used(lambda used: {
            "voluntary": used.voluntary_switches, "involuntary": used.involuntary_switches,
        }),
    ),
)  # fmt: skip
