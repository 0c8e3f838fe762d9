"""What a report must say of the machine: what it is, and the state it is in. Reads files only."""

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from coordinator.processes.group import read_text
from coordinator.processes.program import first_line_of

PACKAGES = ("moe-coord", "numpy", "gguf", "pyzmq", "msgpack")
# sensors by their driver's name; many processors, AMD's above all, are in no thermal zone
PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
DISK_SENSORS = ("nvme", "drivetemp")


def describe_machine(root: Path = Path("/")) -> dict[str, object]:
    """Processor, cores, memory, kernel: what stays."""
    cpuinfo = _fields(read_text(root / "proc/cpuinfo"))
    meminfo = _fields(read_text(root / "proc/meminfo"))
    governor = read_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    return {
        "cpu": cpuinfo.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_kib": _number(meminfo.get("MemTotal", "")),
        "swap_kib": _number(meminfo.get("SwapTotal", "")),
        "kernel": platform.release(),
        "governor": governor or None,
    }


def versions() -> dict[str, str | None]:
    """Of the program and what it computes with; `git`: the revision, if it runs from a checkout."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        found[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    folder = str(Path(__file__).parent)
    found["git"] = first_line_of(["git", "-C", folder, "describe", "--always", "--dirty"])
    return found


def state_of_machine(root: Path = Path("/")) -> dict[str, object]:
    """Load, temperature and mains: what drifts. None where the machine does not say."""
    zones = _degrees((root / "sys/class/thermal").glob("thermal_zone*/temp"))
    degrees = [*zones, *_degrees(_sensors(root, PROCESSOR_SENSORS))]
    supplies = [read_text(path) for path in (root / "sys/class/power_supply").glob("*/online")]
    charges = [
        number
        for path in (root / "sys/class/power_supply").glob("*/capacity")
        if (number := _number(read_text(path))) is not None
    ]
    cores = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    counts = [number for path in cores if (number := _number(read_text(path))) is not None]
    governor = root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    available = _fields(read_text(root / "proc/meminfo")).get("MemAvailable", "")
    return {
        "load": read_text(root / "proc/loadavg").split()[:3],
        "available_kib": _number(available),
        "hottest_c": max(degrees, default=None),
        "hottest_disk_c": max(_degrees(_sensors(root, DISK_SENSORS)), default=None),
        "on_mains": any(text.strip() == "1" for text in supplies) if supplies else None,
        "battery_percent": min(charges, default=None),
        "governor": read_text(governor).strip() or None,
        "throttle_count": sum(counts) if counts else None,
    }


def _sensors(root: Path, drivers: Sequence[str]) -> Iterator[Path]:
    """The thermometers of these drivers."""
    for name in (root / "sys/class/hwmon").glob("hwmon*/name"):
        if read_text(name).strip() in drivers:
            yield from name.parent.glob("temp*_input")


def _degrees(files: Iterable[Path]) -> list[float]:
    """What they say, in degrees Celsius; a sensor that sleeps says nothing."""
    numbers = [_number(read_text(file)) for file in files]
    return [number / 1000 for number in numbers if number is not None]


def _fields(text: str) -> dict[str, str]:
    """Lines such as ``MemTotal: 24681000 kB``; the first of a name counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def _number(text: str) -> int | None:
    first = text.split()[0] if text.split() else ""
    return int(first) if first.lstrip("-").isdigit() else None
