"""The state of a machine as its files tell it: what a block line says before and after."""

from pathlib import Path

import pytest

from coordinator.bench.machine import state_of_machine

THERMAL, HWMON, SUPPLY = "sys/class/thermal", "sys/class/hwmon", "sys/class/power_supply"
CPU = "sys/devices/system/cpu"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {"hottest_c": None, "hottest_disk_c": None, "on_mains": None, "governor": None}),
        ({f"{THERMAL}/thermal_zone0/temp": "41000", f"{THERMAL}/thermal_zone1/temp": "nothing"},
         {"hottest_c": 41.0}),
        ({f"{HWMON}/hwmon0/name": "k10temp", f"{HWMON}/hwmon0/temp1_input": "71500",
          f"{HWMON}/hwmon1/name": "nvme", f"{HWMON}/hwmon1/temp1_input": "84000",
          f"{HWMON}/hwmon2/name": "amdgpu", f"{HWMON}/hwmon2/temp1_input": "99000",
          f"{THERMAL}/thermal_zone0/temp": "20000"},
         {"hottest_c": 71.5, "hottest_disk_c": 84.0}),
        ({f"{SUPPLY}/AC/online": "0", f"{SUPPLY}/BAT0/capacity": "63"},
         {"on_mains": False, "battery_percent": 63}),
        ({f"{SUPPLY}/AC/online": "1"}, {"on_mains": True, "battery_percent": None}),
        ({f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave",
          f"{CPU}/cpu0/thermal_throttle/core_throttle_count": "3",
          f"{CPU}/cpu1/thermal_throttle/core_throttle_count": "4"},
         {"governor": "powersave", "throttle_count": 7}),
    ],
)  # fmt: skip
def test_what_drifts(tmp_path: Path, files: dict[str, str], expected: dict[str, object]) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    found = state_of_machine(tmp_path)
    assert {name: found[name] for name in expected} == expected
