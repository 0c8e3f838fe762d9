"""What can be asked of recorded routing: `trace` and `replay`."""

from dataclasses import dataclass
from pathlib import Path

from coordinator.command.flag_values import PATH, Kind
from coordinator.command.flags import flag, required
from coordinator.command.sizes import PoolSize, parse_pool
from coordinator.core.policy_choice import POLICIES

WHAT = "arguments"
POOL_SIZES = tuple(PoolSize(share=percent / 100) for percent in (10, 25, 50, 75))


def _pools(text: str) -> tuple[PoolSize, ...]:
    return tuple(parse_pool(part) for part in text.split(","))


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(POLICIES) if text == "all" else tuple(text.split(","))
    if not set(names) <= set(POLICIES):
        raise ValueError(text)
    return names


POOLS = Kind("SIZES", "sizes such as 10%,50% or 800M, separated by commas", _pools)
POLICY_NAMES = Kind("NAMES", f"all, or some of {', '.join(POLICIES)}, with commas", _policies)


@dataclass(frozen=True, slots=True)
class TraceCommand:
    """`moe-coord trace`: what a recorded routing says about the model and the text."""

    trace: Path = required("TRACE", PATH, WHAT, "a file that --trace wrote")
    other: Path | None = flag(
        None, "OTHER", PATH, WHAT, "another text's trace: does its hot set serve the first?"
    )
    json: bool = flag(False, "--json", None, WHAT, "print one JSON object instead of tables")


@dataclass(frozen=True, slots=True)
class ReplayCommand:
    """`moe-coord replay`: every policy at every size over a recorded routing."""

    trace: Path = required("TRACE", PATH, WHAT, "a file that --trace wrote")
    pools: tuple[PoolSize, ...] = flag(
        POOL_SIZES, "--pool", POOLS, WHAT, "sizes of the pool", default_text="10%,25%,50%,75%"
    )
    policies: tuple[str, ...] = flag(
        tuple(POLICIES), "--policy", POLICY_NAMES, WHAT,
        "policies; those that need counts take part where a file with counts is given",
        default_text="all",
    )  # fmt: skip
    hot_set: Path | None = flag(
        None, "--hot-set", PATH, WHAT, "use counts that policies begin with, as in a run"
    )
    imatrix: Path | None = flag(
        None, "--imatrix", PATH, WHAT, "the same for the policy imatrix, from a GGUF imatrix"
    )
    json: bool = flag(False, "--json", None, WHAT, "print one JSON object instead of tables")
