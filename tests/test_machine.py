from pathlib import Path

from coordinator.command.cores import usable_cores
from coordinator.plan.machine import read_machine


def test_a_machine_is_what_its_files_and_its_mask_say(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    machine = read_machine(tmp_path)
    assert machine.memory.n_bytes == 1 << 20
    (tmp_path / "proc/self/status").write_text("RssAnon:\t 100 kB\nRssFile:\t 9 kB\nVmPTE: 4 kB\n")
    assert read_machine(tmp_path).memory.n_bytes == (1024 + 104) << 10
    assert machine.quota_cores == 0.5
    assert machine.cores == usable_cores()
    assert machine.n_effective_cores == 1
