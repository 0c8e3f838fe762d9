"""What this machine allows, read once at start: cores, memory, kernels. It decides nothing."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from compute_worker.native_types import is_built
from coordinator.command.cores import effective_cores, quota_cores, usable_cores
from coordinator.processes.accounting import private_bytes
from coordinator.processes.available_memory import AvailableMemory, available_memory


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores of the affinity mask, the cgroup's CPU quota in cores (None: none), memory, and whether
    the install has compiled kernels."""

    cores: tuple[int, ...]
    quota_cores: float | None
    memory: AvailableMemory
    has_native_kernels: bool = True

    @property
    def n_effective_cores(self) -> int:
        """Threads that can really run at once."""
        return effective_cores(self.cores, self.quota_cores)


def read_machine(root: Path = Path("/")) -> Machine:
    """Read it now; `root` is where `proc` and `sys` lie."""
    memory = available_memory(root)
    # what this process has taken by now is a part of every budget, and not available any more
    n_bytes = memory.n_bytes + private_bytes("self", root / "proc")
    memory = dataclasses.replace(memory, n_bytes=n_bytes)
    return Machine(usable_cores(), quota_cores(root), memory, is_built())
