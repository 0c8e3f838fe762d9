"""From a checked `Config` to everything a run needs: model, plan, slots, policy, process settings.

`prepare` reads the model's header and the machine, refuses what cannot work, and allocates nothing
of size. What it returns is used by the engine with processes and by ``--single-process`` alike.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from compute_worker.arch import ModelSpec, resolve
from coordinator.command.config import Config
from coordinator.command.cores import ROLES, RUNNING_ROLES, CorePlan, plan_cores
from coordinator.command.token_rows import TokenRows, create_rows
from coordinator.core.geometry import PoolGeometry, pool_geometry, ranges_of
from coordinator.core.page_cache_residency import PageCacheResidency
from coordinator.core.policies import PolicyGeometry
from coordinator.core.policy_choice import make_policy
from coordinator.core.prefetch import Prefetch
from coordinator.core.requests import Requests
from coordinator.core.residency import Residency
from coordinator.core.schedule import Schedule
from coordinator.core.state import Core
from coordinator.plan.budget import MemoryPlan
from coordinator.plan.machine import Machine
from coordinator.plan.memory_request import OnlySequence
from coordinator.plan.resolve import memory_plan, spare_bytes
from coordinator.plan.resolve import resolve as resolve_config
from coordinator.processes.limits import check_open_files, check_threads
from coordinator.routing.imatrix import read_imatrix
from coordinator.routing.trace_file import TraceWriter, create_trace, trace_header
from coordinator.routing.usage import UsageCounts, fresh_usage, read_hot_set, read_usage
from io_worker.model_file import Model, open_model
from io_worker.probe import ReaderChoice, choose_reader
from io_worker.reader import ModelFile, close_files, open_files
from io_worker.reader_trial import Workload
from shm.mapped_files import file_starts
from shm.pool import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Setup:
    """A run before its processes start. `config` has no "auto" left."""

    config: Config
    model: Model
    spec: ModelSpec
    files: tuple[ModelFile, ...]
    plan: MemoryPlan
    cores: CorePlan | None  # None: nothing is pinned
    reader: ReaderChoice
    usage: UsageCounts
    trace: TraceWriter | None
    rows: TokenRows | None  # of --csv
    only: OnlySequence | None  # None: sequences of any length may come

    @property
    def reads_in_flight(self) -> int:
        """Reads at once over all readers: what arms of a comparison must have in common."""
        return _reads_in_flight(self.config)

    @property
    def maps_files(self) -> bool:
        """Whether a process dies of a page of a model file that is not there any more."""
        return not self.config.has_pool or self.config.dense == "mapped"

    @property
    def reader_credit(self) -> int:
        """Slabs that one reader may hold: enough to keep its threads busy while answers travel."""
        depth = self.config.queue_depth if self.config.io_workers else self.config.io_threads
        return max(2, depth)

    def lines(self) -> list[str]:
        """What the first lines of a run say: mode, memory, reader, cores."""
        config = self.config
        if config.single_process:
            mode = "single process"
        elif config.io_workers:
            mode = f"{config.io_workers} I/O worker(s), queue depth {config.queue_depth}"
        elif config.io_threads:
            mode = f"{config.io_threads} reading thread(s) in the compute process"
        else:
            mode = "compute faults" if config.only_faults else "compute reads inline"
        lines = [
            f"model: {config.model.name} ({self.spec.arch}, {self.spec.n_layers} layers, "
            f"{self.spec.n_active} of {self.spec.n_experts} experts per token)",
            f"mode: {mode}; reader {self.reader.name} ({self.reader.reason}); "
            f"{self._cache()}; numerics {config.numerics}; "
            f"{config.compute_threads} compute thread(s)",
            self.plan.describe(),
        ]
        if config.experts_in == "own":
            lines.append("experts: in compute's own memory, with huge pages")
        if config.experts_in == "auto":
            lines.append("experts: in the pool, or in compute's own memory where a trial says so")
        if self.cores is not None:
            lines.append(self.cores.describe(ROLES if config.is_service else RUNNING_ROLES))
        return lines

    def _cache(self) -> str:
        """What keeps experts."""
        if not self.config.has_pool:
            return "the page cache keeps experts, the kernel decides which"
        text = f"policy {self.config.policy}"
        if self.reader.name == "buffered":
            dropped = self.config.drop_cache == "yes"
            text += f"; the page cache {'drops' if dropped else 'keeps'} what was read"
        return text


@contextlib.contextmanager
def prepared(
    config: Config, machine: Machine, only: OnlySequence | None = None, n_sequences: int = 1
) -> Iterator[Setup]:
    """Open the model and plan the run; the files stay open inside the `with`.

    `only` is the one sequence of this run, None where any may come, `n_sequences` at once.
    Raises `ModelFormatError`, `ModelFileError`, `ConfigError`, `ResourceError`.
    """
    model = open_model(config.model)
    spec = resolve(model)
    wanted_cores = config.core_plan
    with contextlib.ExitStack() as stack:
        _check_limits(config, machine, len(model.paths))
        files = tuple(open_files(model.paths))
        stack.callback(close_files, files)
        plan = memory_plan(config, machine, spec, only, n_sequences)
        config = resolve_config(config, machine, spec, only, n_sequences)
        # from what was asked for: the resolved plan is spelled out and has no name
        cores = plan_cores(wanted_cores, machine.cores) if config.pin_cores else None
        setup = _prepare(config, machine, model, spec, files, plan, cores, only)
        for recorder in (setup.trace, setup.rows):
            if recorder is not None:
                stack.callback(recorder.close)
        yield setup


def _prepare(
    config: Config,
    machine: Machine,
    model: Model,
    spec: ModelSpec,
    files: tuple[ModelFile, ...],
    plan: MemoryPlan,
    cores: CorePlan | None,
    only: OnlySequence | None,
) -> Setup:
    workload = Workload(spec.slabs, _reads_in_flight(config), spare_bytes(machine, plan))
    reader = choose_reader(config.reader, files, workload)
    usage = _counts(config, fresh_usage(model.fingerprint, spec))
    config = dataclasses.replace(config, reader=reader.name)
    trace = None
    if config.trace is not None:
        header = trace_header(model.fingerprint, spec.n_active, spec.slabs)
        trace = create_trace(config.trace, header)
    rows = create_rows(config.csv) if config.csv is not None else None
    return Setup(config, model, spec, files, plan, cores, reader, usage, trace, rows, only)


def _check_limits(config: Config, machine: Machine, n_files: int) -> None:
    """See to the limits of this process before it opens anything."""
    n_children = 0 if config.single_process else 1 + config.io_workers
    n_children += 2 if config.is_service else 0  # clients, and chat templates
    check_open_files(n_children, n_files)
    n_computing = config.compute_threads or machine.n_effective_cores
    n_reading = config.io_workers * config.queue_depth + config.io_threads
    check_threads(n_children, n_computing + n_reading)


def _counts(config: Config, fresh: UsageCounts) -> UsageCounts:
    """What is known of other texts: from the one file that was given, if one was."""
    if config.usage is not None:
        return read_usage(config.usage, fresh)
    if config.hot_set is not None:
        return read_hot_set(config.hot_set, fresh)
    if config.imatrix is not None:
        return read_imatrix(config.imatrix, fresh)
    return fresh


def _reads_in_flight(config: Config) -> int:
    if config.io_workers:
        return config.io_workers * config.queue_depth
    if config.only_faults:  # every thread of the kernels may wait for a page
        return config.compute_threads or 1
    return max(1, config.io_threads)


def build_core(setup: Setup) -> Core:
    """The decision core of a run."""
    residency: Residency | PageCacheResidency
    residency = _in_pool(setup) if setup.config.has_pool else _in_page_cache(setup)
    plan = setup.plan
    schedule = Schedule(
        setup.spec.n_layers,
        plan.chunk_tokens,
        plan.n_sequences,
        plan.n_kv_blocks,
        keeps_prefixes=setup.config.is_service or setup.config.session is not None,
    )
    return Core(residency, Requests(schedule), setup.trace.add if setup.trace else None)


def _in_page_cache(setup: Setup) -> PageCacheResidency:
    slabs, config = setup.spec.slabs, setup.config
    class_of_layer = {layer.layer: 0 for layer in slabs.layers}
    geometry = PoolGeometry(
        [], [], class_of_layer, slabs.n_experts, ranges_of(slabs), ALIGNMENT, slabs.is_packed
    )
    return PageCacheResidency(
        geometry,
        file_starts([file.size_bytes for file in setup.files]),
        warms=not config.only_faults,
        standing_grants=_may_stand(setup),
        prefetch=Prefetch(config.prefetch),
    )


def _in_pool(setup: Setup) -> Residency:
    geometry = pool_geometry(setup.spec.slabs, setup.plan.layout, setup.plan.class_of_layer)
    policy = make_policy(
        setup.config.policy,
        PolicyGeometry(geometry.class_of_layer, geometry.slots_of_class),
        setup.usage.counts,
        setup.spec.n_active,
    )
    return Residency(
        geometry,
        policy,
        standing_grants=_may_stand(setup),
        lasting_grants=True,
        whole_layers=setup.config.read_unit == "layer",
        prefetch=Prefetch(setup.config.prefetch),
    )


def _may_stand(setup: Setup) -> bool:
    """Counts and traces are made of `Need`s: standing grants send none."""
    return setup.config.usage is None and setup.trace is None
