"""What can be asked of the measuring commands: `bench`, `capped`, `ceiling`."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from coordinator.command.flag_values import PATH, SIZE, TEXT, Kind, choice, integer, real
from coordinator.command.flags import flag, required
from coordinator.command.sizes import PoolSize, parse_pool, parse_size

WHAT, WHERE, HOW = "what is compared", "what the machine is limited to", "how it is measured"
ARM_EXAMPLE = '"NAME: FLAGS" such as "two workers: --io-workers 2"'
PEER_EXAMPLE = '"NAME=COMMAND" such as "llama.cpp=/opt/llama-bench -t 2"'
_NAME = r"[^\s:=][^:=]{0,39}?"


@dataclass(frozen=True, slots=True)
class Arm:
    """Settings of this program under a name."""

    name: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PeerCommand:
    """Another program that runs the same model; the first word is its path."""

    name: str
    command: tuple[str, ...]


def _arm(text: str) -> Arm:
    match = re.fullmatch(rf"\s*({_NAME})\s*:(.*)", text, re.DOTALL)
    if match is None:
        raise ValueError(text)
    return Arm(match[1], tuple(shlex.split(match[2])))


def _peer(text: str) -> PeerCommand:
    match = re.fullmatch(rf"\s*({_NAME})\s*=(.*)", text, re.DOTALL)
    command = shlex.split(match[2]) if match is not None else []
    if match is None or not command:
        raise ValueError(text)
    return PeerCommand(match[1], tuple(command))


def _caps(text: str) -> tuple[int, ...]:
    return tuple(parse_size(part) for part in text.split(","))


def _pools(text: str) -> tuple[PoolSize, ...]:
    return tuple(parse_pool(part) for part in text.split(","))


QUESTIONS = ("io-process", "memory", "reader", "quant", "workers")
ARM = Kind("ARM", ARM_EXAMPLE, _arm)
CAPS = Kind("SIZES", "sizes such as 1500M or 800M,1500M,3000M", _caps)
POOLS = Kind("SIZES", "sizes such as 20%,60% or 800M", _pools)
PEER = Kind("PEER", PEER_EXAMPLE, _peer)
READ_AHEAD = integer(0, 2**20, "KIB")


@dataclass(frozen=True, slots=True)
class BenchCommand:
    """`moe-coord bench`: settings, and other programs, against each other in paired blocks."""

    files: tuple[Path, ...] = flag(
        (), "MODEL", PATH, WHAT,
        "GGUF file; two for --question quant; with --merge the blocks.jsonl of several runs",
        many=True,
    )  # fmt: skip
    question: str | None = flag(
        None, "--question", choice(*QUESTIONS), WHAT,
        "a ready-made comparison that ends with a sentence", default_text="the arms named below",
    )  # fmt: skip
    synth: bool = flag(
        False, "--synth", None, WHAT,
        "without MODEL: write a model of OLMoE's shapes into DIR of --out, and keep it there",
    )  # fmt: skip
    layers: int = flag(
        4, "--layers", integer(1, 16), WHAT, "layers of that model, about 270 MB each"
    )
    arms: tuple[Arm, ...] = flag(
        (), "--arm", ARM, WHAT, "settings to compare, as NAME: FLAGS; may be repeated",
        default_text="one arm with the defaults", many=True,
    )  # fmt: skip
    peers: tuple[PeerCommand, ...] = flag(
        (), "--peer", PEER, WHAT,
        "a llama-bench or llama-server to compare with, as NAME=COMMAND with its flags; may be "
        "repeated",
        default_text="none", many=True,
    )  # fmt: skip
    against: str | None = flag(
        None, "--against", TEXT, WHAT, "the arm or peer that the others are divided by",
        default_text="the first peer, else the first arm",
    )  # fmt: skip

    caps: tuple[int, ...] = flag(
        (), "--cap", CAPS, WHERE,
        "memory of each block, page cache included, no swap; several: each is tried",
        default_text="no cap",
    )  # fmt: skip
    pools: tuple[PoolSize, ...] = flag(
        (), "--pool", POOLS, WHERE,
        "pool of each arm of a --question; several: each is tried",
        default_text="20%,60% of the experts; with --cap what it leaves",
    )  # fmt: skip
    compute_threads: int | None = flag(
        None, "--compute-threads", integer(1, 256), WHERE,
        "threads of the kernels in every arm of a --question, and of every peer that is not told",
        default_text="one per core",
    )  # fmt: skip
    disk_bytes_per_second: int | None = flag(
        None, "--disk-rate", SIZE, WHERE, "bytes per second that a block may read",
        default_text="as fast as the disk is",
    )  # fmt: skip
    read_ahead_kib: int | None = flag(
        None, "--read-ahead", READ_AHEAD, WHERE, "read-ahead of the model's disk meanwhile",
        default_text="as it is",
    )  # fmt: skip
    keep_cache: bool = flag(
        False, "--keep-cache", None, WHERE, "do not drop the page cache before each block"
    )

    limits: bool = flag(
        False, "--limits", None, WHERE,
        "measure the disk before each block of ours, and say which share of what disk and cores "
        "allow it reached",
    )  # fmt: skip
    niceness: int | None = flag(
        None, "--nice", integer(-20, 19), WHERE,
        "priority of the blocks; -20 keeps the cores for them on a machine that others use",
        default_text="as it is",
    )  # fmt: skip

    n_pairs: int | None = flag(
        None, "--pairs", integer(1, 10_000), HOW, "blocks of each arm",
        default_text="6; with --minutes as many as there is time for",
    )  # fmt: skip
    minutes: float | None = flag(
        None, "--minutes", real(0, 100_000, above_low=True), HOW,
        "begin nothing that would not end within this time", default_text="no limit",
    )  # fmt: skip
    n_tokens: int = flag(
        24, "-n --tokens", integer(0, 100_000), HOW,
        "tokens that count in each block; 0: only the prompt does",
    )  # fmt: skip
    n_warm_up: int = flag(
        16, "--warm-up", integer(0, 100_000), HOW, "tokens before them that do not count"
    )
    n_prompt: int = flag(
        8, "--prompt-tokens", integer(1, 100_000), HOW,
        "random ids in front; others in each round, the same for all arms of one",
    )  # fmt: skip
    seed: int = flag(1, "--seed", integer(0, 2**31 - 1), HOW, "of the random ids")
    copy: str = flag(
        "auto", "--copy", choice("auto", "always", "never"), HOW,
        "measure on a copy of the model that nobody else reads; auto: where its pages cannot be "
        "dropped because another process holds them",
    )  # fmt: skip
    out: Path | None = flag(
        None, "--out", PATH, HOW,
        "folder for blocks.jsonl, answers.json, report.html, CSV and PNG; a folder that holds a "
        "part of the same comparison is continued",
        default_text="nothing is kept",
    )  # fmt: skip
    merge: bool = flag(
        False, "--merge", None, HOW, "measure nothing: answer from blocks.jsonl files"
    )
    ray: str | None = flag(
        None, "--ray", TEXT, HOW, "run it on every node of the Ray cluster at this address",
        default_text="on this machine",
    )  # fmt: skip

    @property
    def model(self) -> Path:
        """The first file; there is one once the command was checked."""
        return self.files[0]

    @property
    def n_generated(self) -> int:
        """Tokens a program has to generate: the one that ends the prompt, warm-up, and measured."""
        return 1 + (self.n_warm_up + self.n_tokens if self.n_tokens else 0)


@dataclass(frozen=True, slots=True)
class CappedCommand:
    """`moe-coord capped`: one command under limits. `command` is what stands behind ``--``."""

    command: tuple[str, ...]
    memory_bytes: int | None = flag(
        None, "-m --memory", SIZE, WHERE, "memory, page cache included; no swap",
        default_text="no cap",
    )  # fmt: skip
    disk_bytes_per_second: int | None = flag(
        None, "-r --disk-rate", SIZE, WHERE, "bytes per second that it may read",
        default_text="as fast as the disk is",
    )  # fmt: skip
    read_ahead_kib: int | None = flag(
        None, "-a --read-ahead", READ_AHEAD, WHERE, "read-ahead of the disk meanwhile",
        default_text="as it is",
    )  # fmt: skip
    disk: Path = flag(Path(), "--disk", PATH, WHERE, "a folder on the disk that is meant")
    keep_cache: bool = flag(False, "--keep-cache", None, WHERE, "do not drop the page cache first")


@dataclass(frozen=True, slots=True)
class CeilingCommand:
    """`moe-coord ceiling`: what disk and arithmetic allow, each measured alone."""

    model: Path = required("MODEL", PATH, WHAT, "GGUF file")
    part: str = flag("both", "--part", choice("both", "disk", "compute"), WHAT, "what to measure")
    seconds: int = flag(
        10, "--seconds", integer(1, 3600), HOW, "for each number of reads in flight"
    )
    compute_threads: int | None = flag(
        None, "--compute-threads", integer(1, 256), HOW, "threads of the kernels",
        default_text="one per core",
    )  # fmt: skip
    out: Path | None = flag(
        None, "--out", PATH, HOW, "folder for report.html, ceiling.json, CSV and PNG",
        default_text="nothing is kept",
    )  # fmt: skip
    json: bool = flag(False, "--json", None, HOW, "print one JSON object instead of tables")
