import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.command.cores import (
    CorePlan,
    effective_cores,
    has_core_alone,
    plan_cores,
    quota_cores,
    usable_cores,
)
from coordinator.command.flag_values import ConfigError


@pytest.mark.parametrize(
    ("text", "cores", "compute", "io"),
    [
        (None, (0, 1), (0, 1), (1,)),
        (None, (3,), (3,), (3,)),
        (None, (0, 1, 2), (0, 1), (2,)),
        (None, (4, 5, 6, 7), (4, 5, 6), (7,)),
        ("shared", (0, 1), (0, 1), (1,)),
        ("shared", (0, 1, 2), (0, 1, 2), (2,)),
        ("split", (0, 1), (0,), (1,)),
        ("split", (2,), (2,), (2,)),
        ("last", (0, 1), (0,), (1,)),
        ("last", (0, 1, 2, 3), (0, 1, 2), (3,)),
        ("compute=0,io=1", (0, 1), (0,), (1,)),
        ("compute=0,1,io=1", (0, 1), (0, 1), (1,)),
        ("io=1,compute=1,0", (0, 1), (0, 1), (1,)),
        ("compute=0", (0, 1), (0,), (0, 1)),
        ("io=0", (0, 1), (0, 1), (0,)),
    ],
)
def test_plans(
    text: str | None, cores: tuple[int, ...], compute: tuple[int, ...], io: tuple[int, ...]
) -> None:
    plan = plan_cores(text, cores)
    assert (plan.compute, plan.io) == (compute, io)
    assert plan.compute_threads == len(compute)
    # spelled out it is the same plan
    again = plan_cores(str(plan), cores)
    assert [again.cores_of(role) for role in ("compute", "io", "coordinator", "http")] == [
        plan.cores_of(role) for role in ("compute", "io", "coordinator", "http")
    ]


def test_roles_that_are_not_named_follow() -> None:
    plan = plan_cores("compute=0,io=1,coordinator=2", (0, 1, 2))
    assert (plan.coordinator, plan.http) == ((2,), (2,))
    plan = plan_cores("compute=0,io=1", (0, 1, 2))
    assert (plan.coordinator, plan.http) == ((1,), (1,))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("compute=99", "out of 0,1 (what this process may use), found 99"),
        ("compute=0,99", "found 99"),  # the kernel would take {0, 99} as {0}
        ("compute=0,io=-1", "found 'compute=0,io=-1'"),
        ("compute=", "found 'compute='"),
        ("compute=0,,io=1", "found 'compute=0,,io=1'"),
        ("compute=0,compute=1", "found compute twice"),
        ("cpu=0", "expected a role out of compute, io, coordinator, http"),
        ("0,compute=1", "found '0,compute=1'"),
        ("compute=a", "found 'compute=a'"),
        ("compute=1" + "0" * 4000, "found"),
        ("both", "expected shared, split, last, or roles"),
        ("", "expected shared, split, last, or roles"),
    ],
)
def test_bad_plans_name_what_may_be_used(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_cores(text, (0, 1))
    assert part in str(caught.value)
    assert str(caught.value).startswith("--core-plan: ")
    assert str(caught.value).endswith("see `moe-coord help cores`")


def test_the_printed_plan_says_what_shares_a_core() -> None:
    assert plan_cores(None, (0, 1)).describe() == (
        "cores (shared): compute on 0,1; io on 1; coordinator on 1; "
        "core 1 is shared by compute, io, coordinator"
    )
    alone = CorePlan("chosen", compute=(0,), io=(1,), coordinator=(2,), http=(2,))
    assert alone.describe().endswith("no core is shared")
    assert alone.describe(("coordinator", "http")).endswith("core 2 is shared by coordinator, http")


def test_usable_cores_are_those_of_the_affinity_mask() -> None:
    """A core outside a taskset is refused, also where the machine has it."""
    core = usable_cores()[0]
    script = (
        f"import os; os.sched_setaffinity(0, {{{core}}})\n"
        "from coordinator.command.cores import usable_cores, plan_cores\n"
        "print(usable_cores(), plan_cores(None, usable_cores()).name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.stdout == f"({core},) one core\n"


V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1 = {"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/a\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2, None),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
               "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 0.5),
        (V2 | {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "nonsense"}, None),
        (V1 | {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
               "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        (V1 | {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000\n",
               "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}, 2.0),
        (V1 | {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000\n",
               "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "0\n"}, None),
    ],
)  # fmt: skip
def test_quota_of_the_cgroups(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota_cores(tmp_path) == quota


@pytest.mark.parametrize(
    ("n_cores", "quota", "n"), [(2, None, 2), (4, 1.5, 2), (4, 0.1, 1), (2, 16.0, 2)]
)
def test_effective_cores(n_cores: int, quota: float | None, n: int) -> None:
    assert effective_cores(range(n_cores), quota) == n


@pytest.mark.parametrize(
    ("plan", "cores", "quota", "is_alone"),
    [
        (None, (0, 1), None, True),
        (None, (3,), None, False),
        (None, (0, 1), 1.5, True),
        (None, (0, 1), 1.0, False),
        (None, (0, 1, 2, 3), 2.0, False),
        ("shared", (0, 1), None, True),
        ("shared", (2,), None, False),
        ("split", (0, 1), None, True),
        ("last", (0, 1, 2), None, True),
        ("compute=0,1,io=0,coordinator=1", (0, 1), None, False),
        ("compute=1,io=0", (0, 1), None, True),
        ("compute=0,io=1,coordinator=0", (0, 1), None, False),
    ],
)
def test_compute_polls_where_nobody_waits_for_its_core(
    plan: str | None, cores: tuple[int, ...], quota: float | None, is_alone: bool
) -> None:
    chosen = None if plan is None else plan_cores(plan, cores)
    assert has_core_alone(chosen, cores, quota) is is_alone
