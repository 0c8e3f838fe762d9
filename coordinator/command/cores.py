"""Which cores this process may use, and which of them each kind of process gets.

A plan is made from the affinity mask and the cgroup's CPU quota, never from the machine's number of
CPUs, and is printed with what shares a core. This module decides; the processes pin themselves,
before numpy is imported, and read the mask back. `sched_setaffinity({0, 99})` is accepted silently
as {0}, so every core is checked here.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.command.flag_values import ConfigError

ROLES = ("compute", "io", "coordinator", "http")
RUNNING_ROLES = ROLES[:3]  # without the service there is no HTTP process
PLAN_NAMES = ("shared", "split", "last")
PLAN_EXAMPLES = "shared, split, last, or roles with their cores such as compute=0,io=1"
ADVICE = "see `moe-coord help cores`"
UNLIMITED_V1 = -1  # what cpu.cfs_quota_us says without a quota


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cores of each role, ascending. All I/O workers share `io`."""

    name: str
    compute: tuple[int, ...]
    io: tuple[int, ...]
    coordinator: tuple[int, ...]
    http: tuple[int, ...]

    @property
    def compute_threads(self) -> int:
        """Kernel threads that fit this plan: one per compute core."""
        return len(self.compute)

    def cores_of(self, role: str) -> tuple[int, ...]:
        """Cores of one of `ROLES`."""
        cores: tuple[int, ...] = getattr(self, role)
        return cores

    def __str__(self) -> str:
        roles = [f"{role}={','.join(map(str, self.cores_of(role)))}" for role in ROLES]
        return ",".join(roles)

    def describe(self, roles: Sequence[str] = RUNNING_ROLES) -> str:
        """One line for people: where each role runs, and what shares a core."""
        where = "; ".join(f"{role} on {_spell(self.cores_of(role))}" for role in roles)
        shared = []
        for core in sorted({core for role in roles for core in self.cores_of(role)}):
            tenants = [role for role in roles if core in self.cores_of(role)]
            if len(tenants) > 1:
                shared.append(f"core {core} is shared by {', '.join(tenants)}")
        return f"cores ({self.name}): {where}; {'; '.join(shared) or 'no core is shared'}"


def _spell(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))


def usable_cores() -> tuple[int, ...]:
    """Cores of this process's affinity mask, which lies inside its cpuset, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def quota_cores(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota of this process's cgroups, in cores; None where there is none."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and "cpu" not in names.split(","):
            continue
        folder = "sys/fs/cgroup" if not names else "sys/fs/cgroup/cpu"
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            quota = _quota_of(root.joinpath(folder, *parts[:depth]), is_v2=not names)
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def _quota_of(group: Path, *, is_v2: bool) -> float | None:
    """Quota ÷ period of one cgroup; None where it is unlimited or not to be read."""
    try:
        if is_v2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        if quota == "max" or int(quota) == UNLIMITED_V1 or int(period) <= 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def effective_cores(cores: Sequence[int], quota: float | None) -> int:
    """How many threads can really run at once: the mask, cut by the quota, at least 1."""
    return len(cores) if quota is None else max(1, min(len(cores), math.ceil(quota)))


def has_core_alone(plan: CorePlan | None, cores: Sequence[int], quota: float | None) -> bool:
    """Whether compute's first core would idle while it waits. Without a plan the system finds
    others a place where there are two; a quota of the container counts what is polled away."""
    if effective_cores(cores, quota) < max(2, len(cores)):
        return False
    return plan is None or not {plan.compute[0]} & {*plan.io, *plan.coordinator, *plan.http}


def plan_cores(text: str | None, cores: Sequence[int]) -> CorePlan:
    """The plan that `text` asks for (None: by the number of cores); raises `ConfigError`.

    With one core every plan puts everything on it.
    """
    if text is None:
        return _named_plan("shared" if len(cores) <= 2 else "last", cores)
    if "=" in text:
        return _explicit_plan(text, cores)
    if text not in PLAN_NAMES:
        raise _refusal(f"expected {PLAN_EXAMPLES}, found {text!a:.60}")
    if text == "last" and len(cores) == 2:
        return _named_plan("split", cores)
    return _named_plan(text, cores)


def _named_plan(name: str, cores: Sequence[int]) -> CorePlan:
    everything, last = tuple(cores), (cores[-1],)
    if len(cores) == 1:
        return CorePlan("one core", everything, everything, everything, everything)
    if name == "shared":
        return CorePlan(name, everything, last, last, last)
    return CorePlan(name, everything[:-1], last, last, last)


def _explicit_plan(text: str, cores: Sequence[int]) -> CorePlan:
    """`compute=0,1,io=1`: a number without a role belongs to the role before it.

    A role that is not named goes where I/O goes, I/O and compute to all usable cores.
    """
    chosen: dict[str, list[int]] = {}
    role = ""
    for part in text.split(","):
        name, equals, number = part.partition("=")
        if equals:
            role = name.strip()
            if role not in ROLES:
                raise _refusal(f"expected a role out of {', '.join(ROLES)}, found {role!a:.60}")
            if role in chosen:
                raise _refusal(f"expected each role once, found {role} twice")
            chosen[role] = []
        else:
            number = part
        if not role or re.fullmatch(r"\s*\d{1,6}\s*", number, re.ASCII) is None:
            raise _refusal(f"expected {PLAN_EXAMPLES}, found {text!a:.60}")
        chosen[role].append(int(number))
    for numbers in chosen.values():
        for core in numbers:
            if core not in cores:
                raise _refusal(
                    f"expected cores out of {_spell(cores)} (what this process may use), "
                    f"found {core}"
                )
    everything = tuple(cores)
    sets = {role: tuple(sorted(set(numbers))) for role, numbers in chosen.items()}
    io = sets.get("io", everything)
    return CorePlan(
        name="chosen",
        compute=sets.get("compute", everything),
        io=io,
        coordinator=sets.get("coordinator", io),
        http=sets.get("http", sets.get("coordinator", io)),
    )


def _refusal(text: str) -> ConfigError:
    return ConfigError(f"--core-plan: {text}; {ADVICE}")
