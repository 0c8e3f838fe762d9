"""The ready-made comparisons: which arms a question needs, and what is claimed of which pair.

Rule to keep: a pair differs in what it is named for and in nothing else. Arms of a pair have equal
reads in flight, cores (compute threads, pinning) and prefetch; where the pair is about one of
those, its words say so. Reads in flight: workers × queue depth of processes, threads, 1 inline.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.bench.rooms import Room
from coordinator.command.bench_commands import Arm, BenchCommand
from coordinator.command.cores import plan_cores
from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import format_size

DEPTH = 4  # reads in flight of arms that have more than one


@dataclass(frozen=True, slots=True)
class Pair:
    """A claim to test: `arm` ÷ `reference`. Rooms None: each room for itself.

    It reads: `subject` is R × as fast as `than` with ROOM.
    """

    subject: str
    than: str
    arm: str
    reference: str
    rooms: tuple[Room, Room] | None = None
    what: str = "speed"  # or "bytes": read per token


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is run, and what is asked of it. The first pair is the question's headline."""

    question: str
    arms: tuple[Arm, ...]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """What the arms of a question have in common."""

    rooms: tuple[Room, ...]
    models: tuple[Path, ...]
    n_threads: int
    cores: tuple[int, ...]
    has_caps: bool

    @property
    def common(self) -> tuple[str, ...]:
        """Flags of every arm."""
        return ("--compute-threads", str(self.n_threads))


def pair_record(pair: Pair) -> dict[str, Any]:
    """A pair as a block line has it, so that lines can be merged without their command."""
    rooms = [room.name for room in pair.rooms] if pair.rooms is not None else None
    return {key: value for key, value in asdict(pair).items() if key != "rooms"} | {"rooms": rooms}


def sweep_of(bench: BenchCommand, setting: Setting) -> Sweep:
    """The arms and pairs of `--question`. Raises `ConfigError`."""
    assert bench.question is not None
    if bench.arms:
        raise ConfigError(
            "--arm: expected arms or --question, found both; a question brings its own arms"
        )
    return SWEEPS[bench.question](setting)


def _arm(setting: Setting, name: str, *flags: str) -> Arm:
    return Arm(name, (*flags, *setting.common))


def _pinned(setting: Setting, name: str, *flags: str) -> Arm:
    """The default plan; of its cores no more threads than the others have."""
    n_threads = min(setting.n_threads, plan_cores(None, setting.cores).compute_threads)
    return Arm(name, (*flags, "--pin-cores", "--compute-threads", str(n_threads)))


def _threads_said(setting: Setting) -> tuple[str, str]:
    """How a pinned arm and its partner differ in compute threads, if they do."""
    pinned = min(setting.n_threads, plan_cores(None, setting.cores).compute_threads)
    if pinned == setting.n_threads:
        return "", ""
    return f" (compute threads: {pinned})", f" ({setting.n_threads})"


def _processes(n_workers: int, depth: int) -> tuple[str, ...]:
    return ("--io-workers", str(n_workers), "--queue-depth", str(depth))


def io_process(setting: Setting) -> Sweep:
    """Does a separate I/O process help on this machine?"""
    same = ("--prefetch", "off")  # who reads inline can read nothing ahead
    deep = (*_processes(1, DEPTH), *same)
    arms = (
        _arm(setting, "inline", "--io-workers", "0", *same),
        _arm(setting, "process-1", *_processes(1, 1), *same),
        _arm(setting, "single-process", "--single-process", "--io-threads", str(DEPTH), *same),
        _arm(setting, "thread", "--io-workers", "0", "--io-threads", str(DEPTH), *same),
        _arm(setting, "process", *deep),
        _pinned(setting, "process-pinned", *deep),
    )
    each = f"{DEPTH} reads in flight"
    threads, other_threads = _threads_said(setting)
    pairs = (
        Pair("a separate I/O process", "reading inline (1 read in flight each)", "process-1",
             "inline"),
        Pair("a separate I/O process", f"reading threads inside compute ({each} each)", "process",
             "thread"),
        Pair("a separate I/O process", f"one process that does everything ({each} each)",
             "process", "single-process"),
        Pair(f"a separate I/O process with {each}", "reading inline (1 in flight)", "process",
             "inline"),
        Pair(f"a separate I/O process that is pinned{threads}", f"one that is not{other_threads}",
             "process-pinned", "process"),
    )  # fmt: skip
    note = (
        "where a separate process reads, compute keeps its first core awake while it waits; where "
        "it reads itself it does not, since that is slower there (--poll auto)"
    )
    return Sweep("io-process", arms, pairs, (note,))


def memory(setting: Setting) -> Sweep:
    """Speed against memory, with and without prefetch."""
    deep = _processes(1, DEPTH)
    arms = (
        _arm(setting, "prefetch-off", *deep, "--prefetch", "off"),
        _arm(setting, "prefetch-router", *deep, "--prefetch", "router"),
    )
    sizes = [
        Pair(f"a run with {more.name}", f"one with {less.name}", "prefetch-off", "prefetch-off",
             (more, less))
        for less, more in zip(setting.rooms, setting.rooms[1:], strict=False)
    ]  # fmt: skip
    guess = Pair("prefetch", "none", "prefetch-router", "prefetch-off")
    return Sweep("memory", arms, (*sizes, guess))


def reader(setting: Setting) -> Sweep:
    """Which way of reading is fastest here, all with the same reads in flight."""
    same = ("--prefetch", "off")
    deep = (*_processes(1, DEPTH), *same)
    arms = [
        _arm(setting, "direct", *deep, "--reader", "direct"),
        _arm(setting, "buffered", *deep, "--reader", "buffered"),
    ]
    words = {"buffered": "reading through the page cache into the pool"}
    notes = []
    if setting.has_caps:
        for name in ("willneed", "populate"):
            arms.append(_arm(setting, name, *deep, "--reader", name))
        arms.append(_arm(setting, "mmap", *_processes(DEPTH, 1), *same, "--reader", "mmap"))
        words |= {
            "willneed": "the page cache alone, asked for by madvise(WILLNEED),",
            "populate": "the page cache alone, filled by madvise(POPULATE_READ),",
            "mmap": "the page cache alone, touched page by page,",
        }
    else:
        notes.append(
            "readers that leave the experts to the page cache are left out: without --cap they "
            "may fill all memory while the others keep to their pool"
        )
    pairs = [Pair(text, "O_DIRECT into the pool", name, "direct") for name, text in words.items()]
    return Sweep("reader", tuple(arms), tuple(pairs), tuple(notes))


def quant(setting: Setting) -> Sweep:
    """Two files of the same model: is the smaller one faster than its bytes alone make it?"""
    if len(setting.models) != 2:
        raise ConfigError(
            f"MODEL: expected two files for --question quant, found {len(setting.models)}; name "
            "the larger and the smaller one"
        )
    deep = _processes(1, DEPTH)
    large, small = sorted(setting.models, key=lambda path: -path.stat().st_size)
    arms = tuple(
        _arm(setting, name, "--model", str(path), *deep)
        for name, path in (("larger-file", large), ("smaller-file", small))
    )
    words = f"{small.name} ({format_size(small.stat().st_size)})"
    than = f"{large.name} ({format_size(large.stat().st_size)})"
    pairs = tuple(
        Pair(words, than, "smaller-file", "larger-file", what=what) for what in ("speed", "bytes")
    )
    return Sweep("quant", arms, pairs)


def workers(setting: Setting) -> Sweep:
    """How many I/O processes, all with the same reads in flight."""
    counts = [n for n in (1, 2, 4) if DEPTH % n == 0]
    arms = [_arm(setting, f"workers-{n}", *_processes(n, DEPTH // n)) for n in counts]
    arms += [_pinned(setting, f"workers-{n}-pinned", *_processes(n, DEPTH // n)) for n in (1, 2)]
    one = f"one of them ({DEPTH} reads in flight each)"
    pairs = [
        Pair(f"reading with {n} I/O processes", one, f"workers-{n}", "workers-1")
        for n in counts[1:]
    ]
    threads, other_threads = _threads_said(setting)
    pairs += [
        Pair(f"pinning of {n} I/O process{'es' if n > 1 else ''}{threads}", f"none{other_threads}",
             f"workers-{n}-pinned", f"workers-{n}")
        for n in (1, 2)
    ]  # fmt: skip
    return Sweep("workers", tuple(arms), tuple(pairs))


def named_arms(arms: tuple[str, ...], reference: str) -> Sweep:
    """A comparison of arms that the user named: each against the reference."""
    pairs = tuple(Pair(name, reference, name, reference) for name in arms if name != reference)
    return Sweep("arms", (), pairs)


def with_peers(sweep: Sweep, peers: tuple[str, ...], reference: str) -> Sweep:
    """The same with other programs in it: our last unpinned arm against each."""
    found = tuple(Pair(f"this program ({reference})", name, reference, name) for name in peers)
    return replace(sweep, pairs=sweep.pairs + found)


SWEEPS: Mapping[str, Callable[[Setting], Sweep]] = {
    "io-process": io_process,
    "memory": memory,
    "reader": reader,
    "quant": quant,
    "workers": workers,
}
BEST_ARM: Mapping[str, str] = {
    "io-process": "process",
    "memory": "prefetch-off",
    "reader": "direct",
    "quant": "larger-file",
    "workers": "workers-1",
}
