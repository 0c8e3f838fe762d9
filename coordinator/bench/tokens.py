"""Do a peer and this program say the same? Greedy tokens of both, for each of a few prompts.

Once per comparison and outside of its blocks. `llama-server` gives its tokens; `llama-bench` draws
ids of its own and has none to compare. Both round differently, so two tokens whose scores are
nearly equal may change places, and all that follows is then another text: with random weights,
whose scores are all alike, early.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from coordinator.bench.arms import arm_command
from coordinator.command.bench_commands import Arm, PeerCommand
from coordinator.command.signals import StopSignals
from coordinator.processes.group import ProcessTree
from coordinator.processes.program import run_watched

N_TOKENS = 16
SERVER = "llama-server"


def compared_tokens(
    peers: Iterable[PeerCommand],
    model: Path,
    prompts: Sequence[Sequence[int]],
    flags: Sequence[str],
    seconds: float,
    stop: StopSignals,
) -> list[str]:
    """A line per peer that gives its tokens; `flags` are our arm's, `seconds` for each run."""
    servers = [peer for peer in peers if Path(peer.command[0]).name == SERVER]
    if not servers:
        return []
    arm = Arm("greedy", (*flags, "--numerics", "exact"))
    ours = [
        _tokens(arm_command(arm, model, prompt, N_TOKENS, 1, temperature=0), seconds, stop)
        for prompt in prompts
    ]
    lines = []
    for peer in servers:
        theirs = [_tokens(greedy_command(peer, model, prompt), seconds, stop) for prompt in prompts]
        if not all(ours) or not all(theirs):
            lines.append(f"{peer.name}: tokens were not compared: a run gave none")
            continue
        equal = [common_prefix(*both) for both in zip(ours, theirs, strict=True)]
        lines.append(
            f"{peer.name}: of {N_TOKENS} greedy tokens the first {' and '.join(map(str, equal))} "
            f"equal those of this program, by prompt (--numerics exact)"
        )
    return lines


def greedy_command(peer: PeerCommand, model: Path, prompt: Sequence[int]) -> list[str]:
    """Our process that asks the server."""
    return [
        sys.executable, "-P", "-m", "coordinator.bench.llama_server", "--greedy",
        "--model", str(model), "--tokens", ",".join(map(str, prompt)), "--n", str(N_TOKENS),
        "--", *peer.command,
    ]  # fmt: skip


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many are equal from the start."""
    for n, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return n
    return min(len(one), len(other))


def _tokens(command: Sequence[str], seconds: float, stop: StopSignals) -> list[int]:
    """Empty if the program fails or takes too long."""
    seen = run_watched(command, ProcessTree(), stop, seconds)
    if seen.exit_code != 0 or seen.is_timed_out:
        return []
    tokens: list[int] = json.loads(seen.output).get("tokens", [])
    return tokens
