"""Who takes part in a comparison: arms and peers as commands, in which rooms, against whom."""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compute_worker.arch import dense_bytes
from coordinator.bench.arms import arm_command, check_arm, model_of_arm, read_arm
from coordinator.bench.block import Participant
from coordinator.bench.models import Measured
from coordinator.bench.peer import peer_of, with_threads
from coordinator.bench.questions import (
    BEST_ARM,
    Setting,
    Sweep,
    named_arms,
    sweep_of,
    with_peers,
)
from coordinator.bench.rooms import Room, left_out, rooms_of
from coordinator.command.bench_commands import Arm, BenchCommand, PeerCommand
from coordinator.command.cores import usable_cores
from coordinator.command.flag_values import ConfigError
from coordinator.plan.machine import read_machine

DEFAULT_ARM = Arm("moe-coord", ())
WITHOUT_POOL = ("mmap", "willneed", "populate")  # readers
REST_BYTES = 512 << 20  # beside pool and dense weights: processes, keys and values, the system


@dataclass(frozen=True, slots=True)
class Who:
    """Everything that takes part. `copies`: the file that is measured in the place of another."""

    arms: tuple[Arm, ...]
    participants: tuple[Participant, ...]
    rooms: tuple[Room, ...]
    sweep: Sweep
    reference: str  # of the tables
    n_threads: int
    copies: Mapping[Path, Path]

    def files_of(self, models: Sequence[Measured]) -> tuple[Path, ...]:
        """Files that are read: copies where there are some."""
        return tuple(
            self.copies[model.path].parent / path.name if model.path in self.copies else path
            for model in models
            for path in model.paths
        )


def who_of(bench: BenchCommand, models: Sequence[Measured], copies: Mapping[Path, Path]) -> Who:
    """Arms and peers in the order in which they run. Raises `ConfigError`."""
    n_threads = bench.compute_threads or len(usable_cores())
    spec = models[0].spec
    spare = read_machine().memory.n_bytes - dense_bytes(spec) - REST_BYTES
    expert_bytes = max(model.expert_bytes for model in models)
    rooms = rooms_of(bench, expert_bytes, spare)
    files = tuple(copies.get(path, path) for path in bench.files)
    peers = tuple(with_threads(peer, n_threads) for peer in bench.peers)
    if bench.question is not None:
        setting = Setting(rooms, files, n_threads, usable_cores(), bool(bench.caps))
        sweep = sweep_of(bench, setting)
        arms, reference = sweep.arms, BEST_ARM[bench.question]
        sweep = with_peers(sweep, tuple(peer.name for peer in peers), reference)
        sweep = replace(sweep, notes=(*sweep.notes, *left_out(bench, rooms, expert_bytes)))
    else:
        arms, reference = bench.arms or (DEFAULT_ARM,), _reference(bench)
        names = (*(arm.name for arm in arms), *(peer.name for peer in peers))
        sweep = named_arms(names, reference)
    found = [_our_arm(arm, bench, files[0], copies) for arm in arms]
    found += [_peer(peer, bench, files[0]) for peer in peers]
    _check_names(bench, [each.name for each in found])
    if bench.against is not None:
        reference = bench.against
    return Who(tuple(arms), tuple(found), rooms, sweep, reference, n_threads, copies)


def _reference(bench: BenchCommand) -> str:
    """Name of what the others are divided by."""
    if bench.against is not None:
        return bench.against
    if bench.peers:
        return bench.peers[0].name
    return bench.arms[0].name if bench.arms else DEFAULT_ARM.name


def _check_names(bench: BenchCommand, names: Sequence[str]) -> None:
    counts = Counter(names)
    twice = next((name for name, n in counts.items() if n > 1), None)
    if twice is not None:
        raise ConfigError(f"--arm: expected every name once, found {twice!r} again; rename one")
    if bench.against is not None and bench.against not in counts:
        raise ConfigError(
            f"--against: expected one of {', '.join(counts)}, found {bench.against[:60]!a}; "
            "name an arm or a peer"
        )


def _our_arm(
    arm: Arm, bench: BenchCommand, model: Path, copies: Mapping[Path, Path]
) -> Participant:
    check_arm(arm)
    named = model_of_arm(arm, model)
    if named != model:  # the last of two counts
        same = [copy for path, copy in copies.items() if path.resolve() == named.resolve()]
        arm = replace(arm, flags=(*arm.flags, "--model", str(same[0] if same else named)))
    return Participant(
        arm.name,
        "moe-coord",
        lambda room, prompt, seed: arm_command(
            Arm(arm.name, _fitting(arm, room)), model, prompt, bench.n_generated, seed
        ),
        lambda seen: read_arm(seen, bench.n_prompt),
    )


def _fitting(arm: Arm, room: Room) -> tuple[str, ...]:
    """Flags of arm and room: readers that leave experts to the page cache have no pool."""
    flags = room.flags
    if "--reader" in arm.flags and arm.flags[arm.flags.index("--reader") + 1] in WITHOUT_POOL:
        flags = tuple(
            text
            for at, text in enumerate(flags)
            if "--pool" not in (text, flags[at - 1] if at else "")
        )
    return (*arm.flags, *flags)


def _peer(peer: PeerCommand, bench: BenchCommand, model: Path) -> Participant:
    rules = peer_of(peer)
    if shutil.which(peer.command[0]) is None:
        raise ConfigError(
            f"--peer {peer.name!r}: expected a program that can be run, found none as "
            f"{peer.command[0]!a:.200}; check its path"
        )
    bench = replace(bench, files=(model,))
    rules.command(peer, bench, (0,), 0)  # refuse now what it would refuse later
    return Participant(
        peer.name,
        Path(peer.command[0]).name,
        lambda room, prompt, seed: rules.command(peer, bench, prompt, seed),
        lambda seen: rules.read(seen, bench),
    )
