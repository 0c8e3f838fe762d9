"""Other programs in the same comparison: how each is asked, and how its answer is read.

`llama-bench` of llama.cpp draws its token ids itself, at random. It says how long a run of N
tokens took, not each token. So the tokens of a block are R runs of G tokens inside one process,
where G divides the warm-up and what is measured: the first runs are the warm-up and are dropped
whole, nothing is subtracted. Each run starts again at the depth of the prompt, whose keys and
values it computes once and then restores outside of the measured time. Nothing else differs from
one long run but the position of a token, which at these lengths is not seen in its time.
With 0 tokens to measure the prompt is: the second of two runs, or the only one without warm-up.

`llama-server` gets our prompt and seed and tells of every token when it arrives, so it is measured
like an arm of ours; see `llama_server`.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.bench.timings import BlockError, Span, Timings
from coordinator.command.bench_commands import BenchCommand, PeerCommand
from coordinator.command.flag_values import ConfigError
from coordinator.processes.program import Watched

MIN_RUN_TOKENS = 4  # shorter runs would measure their own start
RUN_LINE = re.compile(r"llama-bench: .*(generation|prompt) run (\d+)/\d+")
REPORTED = (
    "build_commit", "build_number", "cpu_info", "model_type", "n_batch", "n_ubatch", "n_threads",
    "type_k", "type_v", "flash_attn", "use_mmap", "load_mode", "repack", "n_depth", "backends",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Peer:
    """How one program is asked and read."""

    command: Callable[[PeerCommand, BenchCommand, Sequence[int], int], list[str]]
    read: Callable[[Watched, BenchCommand], Timings]


def peer_of(peer: PeerCommand) -> Peer:
    """Known by the file name of its program. Raises `ConfigError`."""
    name = Path(peer.command[0]).name
    if name not in PEERS:
        raise ConfigError(
            f"--peer {peer.name!r}: expected a program of {', '.join(PEERS)}, found {name[:60]!a}; "
            "give the path of one of them"
        )
    return PEERS[name]


def with_threads(peer: PeerCommand, n_threads: int) -> PeerCommand:
    """The peer with as many threads as our arms have, unless its command says how many."""
    if {"-t", "--threads"} & set(peer.command):
        return peer
    return PeerCommand(peer.name, (*peer.command, "-t", str(n_threads)))


def llama_bench_command(
    peer: PeerCommand, bench: BenchCommand, prompt: Sequence[int], seed: int
) -> list[str]:
    """Our flags come last. Raises `ConfigError` if warm-up and tokens have no run in common."""
    command = [*peer.command, "-m", str(bench.model), "--no-warmup", "--progress", "-o", "json"]
    if bench.n_tokens == 0:
        n_runs = 2 if bench.n_warm_up else 1
        return [*command, "-p", str(bench.n_prompt), "-n", "0", "-r", str(n_runs)]
    n_run = math.gcd(bench.n_warm_up, bench.n_tokens)
    if n_run < min(MIN_RUN_TOKENS, bench.n_tokens):
        raise ConfigError(
            f"--tokens: expected tokens and warm-up with a common divisor of {MIN_RUN_TOKENS} or "
            f"more for {peer.name!r}, found {bench.n_tokens} and {bench.n_warm_up}; use such as "
            "24 and 16"
        )
    n_runs = (bench.n_warm_up + bench.n_tokens) // n_run
    depth = ["-d", str(bench.n_prompt)]
    return [*command, *depth, "-p", "0", "-n", str(n_run), "-r", str(n_runs)]


def read_llama_bench(seen: Watched, bench: BenchCommand) -> Timings:
    """Times from its JSON, their places on the clock from its progress lines."""
    try:
        (record,) = json.loads(seen.output)
        seconds = [nanoseconds / 1e9 for nanoseconds in record["samples_ns"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BlockError(f"expected the JSON of llama-bench, found {seen.output[:80]!r}") from error
    kind = "generation" if bench.n_tokens else "prompt"
    starts = [
        moment
        for moment, line in seen.error_lines
        if (found := RUN_LINE.search(line)) is not None and found[1] == kind
    ]
    if len(starts) != len(seconds):
        raise BlockError(
            f"expected {len(seconds)} progress lines of llama-bench, found {len(starts)}"
        )
    n_run = record["n_gen"] if bench.n_tokens else record["n_prompt"]
    spans = tuple(Span(n_run, taken, start) for taken, start in zip(seconds, starts, strict=True))
    report: dict[str, Any] = {key: record[key] for key in REPORTED if key in record}
    if bench.n_tokens == 0:
        return Timings(spans[-1], (), (), report)
    return Timings(None, spans, (), report)


def llama_server_command(
    peer: PeerCommand, bench: BenchCommand, prompt: Sequence[int], seed: int
) -> list[str]:
    """A process of ours that starts the server and asks it."""
    return [
        sys.executable, "-P", "-m", "coordinator.bench.llama_server",
        "--model", str(bench.model), "--tokens", ",".join(map(str, prompt)),
        "--n", str(bench.n_generated), "--seed", str(seed), "--", *peer.command,
    ]  # fmt: skip


def read_llama_server(seen: Watched, bench: BenchCommand) -> Timings:
    """The first arrival is the prompt's, and brings one token."""
    try:
        record = json.loads(seen.output)
        (_, first), *others = record["arrivals"]
        prompt = Span(bench.n_prompt, first, record["started_monotonic_s"])
        started = prompt.started + first
        spans = []
        for n_tokens, seconds in others:
            spans.append(Span(n_tokens, seconds, started))
            started += seconds
        return Timings(prompt, tuple(spans), (), {"build_info": record.get("build_info")})
    except (ValueError, KeyError, TypeError) as error:
        raise BlockError(f"expected arrivals of tokens, found {seen.output[:80]!r}") from error


PEERS: Mapping[str, Peer] = {
    "llama-bench": Peer(llama_bench_command, read_llama_bench),
    "llama-server": Peer(llama_server_command, read_llama_server),
}
