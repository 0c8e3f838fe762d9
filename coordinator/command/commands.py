"""The sub-commands and their flags, declared like those of the main job.

`COMMANDS` is the table that the command line, its help and shell completion share. A command is a
frozen dataclass of what was asked for; what it does stands elsewhere.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.command.bench_commands import BenchCommand, CappedCommand, CeilingCommand
from coordinator.command.client_commands import ChatArguments, ChatCommand, TopCommand
from coordinator.command.config import (
    COMPUTE,
    INPUT,
    MEMORY,
    PROCESSES,
    READING,
    SAMPLING,
    Config,
    shipped_model,
)
from coordinator.command.flag_values import PATH, TOKEN_IDS, choice, integer, real
from coordinator.command.flags import Flag, flag, flags_of, required
from coordinator.command.trace_commands import ReplayCommand, TraceCommand

ARGUMENTS = "arguments"
SHELLS = ("bash", "zsh", "fish")
TOPICS = ("memory", "cores", "readers", "policies")
SYNTH_SHAPES = ("olmoe", "qwen3moe", "qwen3moe-235b")
SYNTH_MIXES = ("q4_k_m", "q2_k", "mxfp4")
ENGINE_GROUPS = (PROCESSES, READING, MEMORY, COMPUTE)
# command -> groups of the main job's flags that it has too
BORROWED_GROUPS: Mapping[str, tuple[str, ...]] = {
    "eval": ENGINE_GROUPS,
    "plan": ENGINE_GROUPS,
    "calibrate": (INPUT, SAMPLING, *ENGINE_GROUPS),
    "chat": ENGINE_GROUPS,
}
CHAT_BORROWS = ("model", "model_cache")
COUNTS_OF_OTHERS = ("policy", "usage", "hot_set", "imatrix")  # calibration makes its own


@dataclass(frozen=True, slots=True)
class MapCommand:
    """`moe-coord map`: the sizes of a model's parts."""

    model: Path = flag(
        shipped_model(), "MODEL", PATH, ARGUMENTS, "GGUF file", default_text="the shipped model"
    )
    json: bool = flag(False, "--json", None, ARGUMENTS, "print one JSON object instead of bars")


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """What `moe-coord plan` has beside the flags of the engine."""

    model: Path = flag(
        shipped_model(), "MODEL", PATH, ARGUMENTS, "GGUF file", default_text="the shipped model"
    )
    n_prompt: int = flag(
        128, "--prompt-tokens", integer(1, 2**24), ARGUMENTS, "length of the prompt to plan for"
    )
    n_answer: int = flag(
        128, "-n --max-tokens", integer(1, 2**24), ARGUMENTS, "length of its answer"
    )
    probe_seconds: float = flag(
        2.0, "--probe-seconds", real(0.1, 3600), ARGUMENTS,
        "how long to measure the disk, and again the arithmetic",
    )  # fmt: skip
    routing: Path | None = flag(
        None, "--routing", PATH, ARGUMENTS,
        "a trace of this model: what its routing would hit, beside what models of its kind do",
    )  # fmt: skip
    json: bool = flag(False, "--json", None, ARGUMENTS, "print one JSON object instead of lines")


@dataclass(frozen=True, slots=True)
class PlanCommand:
    """`moe-coord plan`: what a run would do with memory and disk, and how fast."""

    config: Config
    n_prompt: int
    n_answer: int
    probe_seconds: float
    routing: Path | None
    json: bool


@dataclass(frozen=True, slots=True)
class EvalArguments:
    """What `moe-coord eval` has beside the flags of the engine."""

    model: Path = required("MODEL", PATH, ARGUMENTS, "GGUF file")
    prompt_tokens: tuple[int, ...] = required(
        "--tokens", TOKEN_IDS, ARGUMENTS, "token ids such as 5,77,300"
    )
    out: Path = required("--out", PATH, ARGUMENTS, "the .npz file to write")


@dataclass(frozen=True, slots=True)
class EvalCommand:
    """`moe-coord eval`: logits and chosen experts of every token, through the whole engine."""

    config: Config
    out: Path


@dataclass(frozen=True, slots=True)
class CalibrateArguments:
    """What `moe-coord calibrate` has beside flags of the main job, which it is with --usage OUT."""

    model: Path = required("MODEL", PATH, ARGUMENTS, "GGUF file")
    out: Path = required(
        "--out", PATH, ARGUMENTS, "where the counts go; those that are there are added to"
    )


@dataclass(frozen=True, slots=True)
class SynthCommand:
    """`moe-coord synth`: a file with a real model's shapes and random weights."""

    shape: str = required("SHAPE", choice(*SYNTH_SHAPES), ARGUMENTS, "whose shapes")
    mix: str = required("MIX", choice(*SYNTH_MIXES), ARGUMENTS, "types of the weights")
    out: Path = required("OUT", PATH, ARGUMENTS, "the file to write")
    layers: int | None = flag(
        None, "--layers", integer(1, 1024), ARGUMENTS, "how many layers",
        default_text="as many as the real model",
    )  # fmt: skip
    sparse: bool = flag(
        False, "--sparse", None, ARGUMENTS,
        "header only, the weights are a hole in the file: for plans, not for running",
    )  # fmt: skip
    force: bool = flag(False, "--force", None, ARGUMENTS, "write over an existing file")


@dataclass(frozen=True, slots=True)
class PackCommand:
    """`moe-coord pack`: the same model with every expert in one piece."""

    model: Path = required("MODEL", PATH, ARGUMENTS, "GGUF file, or any part of a set")
    out: Path = required(
        "OUT", PATH, ARGUMENTS, "the file to write; an interrupted run is gone on with"
    )


@dataclass(frozen=True, slots=True)
class VerifyCommand:
    """`moe-coord verify`: compare a model with its checksums."""

    model: Path = required("MODEL", PATH, ARGUMENTS, "plain or packed model")
    manifest: Path | None = flag(
        None, "--manifest", PATH, ARGUMENTS,
        "where the checksums are: a packed file of the same model, or what --write-manifest wrote",
        default_text="a packed model's own",
    )  # fmt: skip
    write_manifest: Path | None = flag(
        None, "--write-manifest", PATH, ARGUMENTS, "write the checksums that were found to a file"
    )


@dataclass(frozen=True, slots=True)
class HelpCommand:
    """`moe-coord help`: one topic, or None for the list of them."""

    topic: str | None = flag(None, "TOPIC", choice(*TOPICS), ARGUMENTS, "what to explain")


@dataclass(frozen=True, slots=True)
class CompletionCommand:
    """`moe-coord completion`: the script that teaches a shell the flags."""

    shell: str = required("SHELL", choice(*SHELLS), ARGUMENTS, "which shell")


Command = (
    Config
    | MapCommand
    | PlanCommand
    | EvalCommand
    | SynthCommand
    | PackCommand
    | VerifyCommand
    | BenchCommand
    | CappedCommand
    | CeilingCommand
    | TraceCommand
    | ReplayCommand
    | TopCommand
    | ChatCommand
    | HelpCommand
    | CompletionCommand
)

# name -> (what it does, fields and flags)
COMMANDS: Mapping[str, tuple[str, type]] = {
    "map": ("sizes of a model's parts: dense, experts, what one token touches", MapCommand),
    "plan": ("memory, disk and speed that a run would have; loads nothing", PlanArguments),
    "eval": ("logits and chosen experts of given tokens, as an .npz file", EvalArguments),
    "calibrate": ("count which experts a text uses, for --hot-set", CalibrateArguments),
    "synth": ("write a model of a real one's shapes with random weights", SynthCommand),
    "pack": ("write a model anew with every expert in one piece, one read each", PackCommand),
    "verify": ("compare every tensor and expert of a model with its checksum", VerifyCommand),
    "bench": ("compare settings, and other programs, in paired blocks", BenchCommand),
    "capped": ("run any command under a memory cap and a disk rate", CappedCommand),
    "ceiling": ("measure what disk and arithmetic allow, each alone", CeilingCommand),
    "trace": ("what a recorded routing says: skew, locality, working set, guesses", TraceCommand),
    "replay": ("hits of every policy at every pool size over a recorded routing", ReplayCommand),
    "chat": ("talk with the model in the terminal", ChatArguments),
    "top": ("the status of a running service in the terminal", TopCommand),
    "help": ("explain memory, cores, readers or policies", HelpCommand),
    "completion": ("print the completion script of a shell", CompletionCommand),
}


def command_flags(name: str | None) -> list[tuple[str, Flag]]:
    """Fields and flags of a sub-command, or of the main job for None."""
    if name is None:
        return list(flags_of(Config))
    flags = list(flags_of(COMMANDS[name][1]))
    if name == "chat":
        flags += [found for found in flags_of(Config) if found[0] in CHAT_BORROWS]
    own = {field_name for field_name, _ in flags}
    for field_name, declared in flags_of(Config):
        if declared.group not in BORROWED_GROUPS.get(name, ()) or field_name in own:
            continue
        if name == "eval" and field_name == "numerics":
            declared = dataclasses.replace(declared, default_text="exact")
        if name != "calibrate" or field_name not in COUNTS_OF_OTHERS:
            flags.append((field_name, declared))
    return flags
