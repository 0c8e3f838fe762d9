"""What would make a planned run faster, in lines for people. Pure."""

from collections.abc import Iterator, Mapping

from compute_worker.arch import ModelSpec, dense_bytes
from coordinator.command.config import Config
from coordinator.command.sizes import format_size
from coordinator.core.slot_classes import smallest_pool_bytes
from coordinator.plan.budget import MemoryPlan
from coordinator.plan.forecast import Forecast
from io_worker.ggml_types import GGML_TYPES

# types that whole models are offered in, by the bits that they take per weight
OFFERED = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "IQ3_XXS", "Q2_K", "IQ2_XS", "IQ2_XXS")
MUCH_FREE = 1.25  # of the budget: less is not worth a line
EVERYTHING_STAYS = (
    "every expert stays in memory: nothing is read after the start, the cores decide the speed"
)


def advice(
    config: Config,
    plan: MemoryPlan,
    spec: ModelSpec,
    available_bytes: int,
    forecasts: Mapping[str, Forecast],
) -> Iterator[str]:
    """Lines, the most useful first."""
    if plan.everything_fits:
        yield EVERYTHING_STAYS
        return
    if not config.has_pool:
        yield (
            "the page cache keeps the experts and the kernel decides which: a reader that fills a "
            "pool (--reader auto) reads less and in larger pieces"
        )
        return
    if plan.maps_dense:
        needed = dense_bytes(spec) - plan.dense_bytes + plan.total_bytes - plan.pool_bytes
        yield (
            "the dense weights do not fit, and every token reads what the page cache lost of them: "
            f"--memory {format_size(needed + smallest_pool_bytes(spec.slabs))} would hold them"
        )
    yield from _memory(plan, available_bytes)
    yield from _what_decides(plan, forecasts)
    yield from _smaller_file(plan, spec)


def bits_per_weight(name: str) -> float:
    """Of a ggml type."""
    found = next(row for row in GGML_TYPES.values() if row.name == name)
    return found.block_bytes * 8 / found.block_elements


def _memory(plan: MemoryPlan, available_bytes: int) -> Iterator[str]:
    warning = plan.warning()
    if warning is not None:
        missing = plan.token_cycle_bytes - plan.pool_bytes
        yield (
            f"the pool is {format_size(missing)} smaller than what one token uses: few experts are "
            f"still there when they are needed again; --memory "
            f"{format_size(plan.budget_bytes + missing)} would hold them"
        )
    if available_bytes > MUCH_FREE * plan.budget_bytes:
        free = available_bytes - plan.budget_bytes
        yield f"{format_size(free)} more memory is free: a larger --memory keeps more experts"


def _what_decides(plan: MemoryPlan, forecasts: Mapping[str, Forecast]) -> Iterator[str]:
    bound = [each.is_disk_bound for each in forecasts.values()]
    missed = max(each.missed_bytes for each in forecasts.values())
    if all(bound):
        yield (
            f"streaming works, and the disk decides the speed: a token reads up to "
            f"{format_size(int(missed))}; a faster disk or more memory helps, more cores do not"
        )
    elif not any(bound):
        yield "streaming costs little here: the cores decide the speed"
    else:
        yield (
            "whether disk or cores decide depends on the text: a token reads up to "
            f"{format_size(int(missed))}"
        )


def _smaller_file(plan: MemoryPlan, spec: ModelSpec) -> Iterator[str]:
    """A file of the same model with fewer bits per weight that would fit whole."""
    weights = sum(3 * spec.width * spec.expert_width * spec.n_experts for _ in spec.slabs.layers)
    now = spec.slabs.total_bytes * 8 / weights
    allowed = (plan.budget_bytes - plan.total_bytes + plan.pool_bytes) * 8 / weights
    fitting = [name for name in OFFERED if bits_per_weight(name) <= allowed]
    if fitting and bits_per_weight(fitting[0]) < now:
        yield (
            f"a file of this model with at most {allowed:.1f} bits per expert weight (such as "
            f"{fitting[0]}) would fit whole; this one has {now:.1f}"
        )
    elif not fitting:
        yield "no usual quantisation of this model would fit whole: stream it"
