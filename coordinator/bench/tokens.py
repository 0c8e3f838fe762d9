"""Do a peer and this program say the same? Greedy tokens of both, for each of a few prompts.

Once per comparison and outside of its blocks. `llama-server` gives its tokens; `llama-bench` draws
ids of its own and has none to compare, so the server that lies beside it is asked. Both programs
round differently, so two tokens whose scores are nearly equal may change places, and all that
follows is then another text: with random weights, whose scores are all alike, early.
"""

import json
import os
import shutil
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
    """A line per peer; `flags` are our arm's, `seconds` for each run."""
    servers = {peer: server_of(peer) for peer in peers}
    if not any(servers.values()):
        return [_not_compared(peer) for peer in servers]
    arm = Arm("greedy", (*flags, "--numerics", "exact"))
    ours = [
        _tokens(arm_command(arm, model, prompt, N_TOKENS, 1, temperature=0), seconds, stop)
        for prompt in prompts
    ]
    lines = []
    for peer, server in servers.items():
        if server is None:
            lines.append(_not_compared(peer))
            continue
        commands = [greedy_command(server, model, prompt) for prompt in prompts]
        theirs = [_tokens(command, seconds, stop) for command in commands]
        if not all(ours) or not all(theirs):
            lines.append(f"{server.name}: tokens were not compared: a run gave none")
            continue
        equal = [common_prefix(*both) for both in zip(ours, theirs, strict=True)]
        lines.append(
            f"{server.name}: of {N_TOKENS} greedy tokens the first {' and '.join(map(str, equal))} "
            f"equal those of this program, by prompt (--numerics exact)"
        )
    return lines


def server_of(peer: PeerCommand) -> PeerCommand | None:
    """Who gives a peer's tokens: itself, or the server of the same build; None without one."""
    program = Path(shutil.which(peer.command[0]) or peer.command[0])
    if program.name == SERVER:
        return peer
    beside = program.with_name(SERVER)
    if not os.access(beside, os.X_OK):
        return None
    return PeerCommand(f"{peer.name} (the {SERVER} beside it)", (str(beside),))


def _not_compared(peer: PeerCommand) -> str:
    return (
        f"{peer.name}: tokens were not compared: {Path(peer.command[0]).name} draws ids of its "
        f"own, and no {SERVER} lies beside it"
    )


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
