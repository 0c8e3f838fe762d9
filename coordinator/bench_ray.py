"""One comparison on every node of a Ray cluster: ``python -P -m coordinator.bench_ray ARGUMENTS``.

The arguments are those of `moe-coord`, with `--ray`. Ray only starts the comparison on each node
and brings its blocks back; the node runs the same command as a person would there, so the model
must lie at the same path on each. Nodes of one host wait for each other: side by side they would
measure each other. A process of its own, since Ray brings threads and libraries. Nothing may
import it.
"""

import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from coordinator.__main__ import reported
from coordinator.bench.merge import run_merge
from coordinator.bench.records import BLOCKS, make_folder
from coordinator.bench.results import ANSWERS
from coordinator.command.bench_commands import BenchCommand
from coordinator.command.flag_values import ConfigError
from coordinator.command.line import parse
from coordinator.command.signals import StopSignals
from coordinator.processes.engine import EngineError
from coordinator.processes.group import ProcessTree
from coordinator.processes.limits import ResourceError
from coordinator.processes.program import run_watched

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    HAS_RAY = True
except ImportError:
    HAS_RAY = False

NOT_FOR_NODES = ("--ray", "--out")  # both are ours; a node writes into a folder of its own
NODE_SECONDS = 7 * 24 * 3600.0
KNOCK_SECONDS = 5.0
N_ERROR_LINES = 3
EXIT_INTERNAL = 5

Blocks = tuple[str, str]  # blocks.jsonl as text (empty: failed), and the last lines of the errors


def main() -> int:
    """Exit codes as `moe-coord` has them."""
    return reported(lambda: run_on_nodes(sys.argv[1:]))


def run_on_nodes(typed: Sequence[str]) -> int:
    """Run it everywhere, keep each node's blocks, and merge them. Returns the exit code.

    Raises `ConfigError`, `ResourceError` without a cluster, `EngineError` if every node fails.
    """
    bench = parse(typed)
    assert isinstance(bench, BenchCommand) and bench.ray is not None
    if not HAS_RAY:
        raise ConfigError(
            "--ray: expected the library ray, found none; pip install 'moe-coord[ray]'"
        )
    if bench.out is not None:
        make_folder(bench.out)
    _knock(bench.ray)
    try:
        ray.init(address=bench.ray, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ResourceError(
            f"--ray: expected a cluster at {bench.ray[:100]!a}, found none: {str(error)[:200]!a}; "
            "start it with `ray start --head`"
        ) from error
    arguments = with_whole_paths(without(typed, NOT_FOR_NODES), bench.files)
    with tempfile.TemporaryDirectory(prefix="moe-coord-ray-") as of_this_run:
        try:
            folder = bench.out or Path(of_this_run)
            files = [path for path in _blocks_of_nodes(folder, arguments) if path]
        finally:
            ray.shutdown()
        if not files:
            raise EngineError(EXIT_INTERNAL, "--ray: the comparison failed on every node")
        return run_merge(replace(bench, files=tuple(files), merge=True))


def _knock(address: str) -> None:
    """Ray tries a dead address for many minutes. Raises `ResourceError`."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in address:
        return  # a word such as auto, or a URL: Ray's to know
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()
    except OSError as error:
        raise ResourceError(
            f"--ray: expected a cluster at {address[:100]!a}, found none: {error}; start it with "
            "`ray start --head`"
        ) from error


def _blocks_of_nodes(folder: Path, arguments: Sequence[str]) -> list[Path | None]:
    """A file per node, None for one that failed; hosts side by side, nodes of a host in turn."""
    of_host: dict[str, list[Mapping[str, Any]]] = {}
    for node in ray.nodes():
        if node["Alive"]:
            of_host.setdefault(node["NodeManagerHostname"], []).append(node)
    run = ray.remote(num_cpus=0, max_retries=0)(run_here)
    files: list[Path | None] = []
    for wave in zip_longest(*of_host.values()):
        nodes = [node for node in wave if node is not None]
        jobs = []
        for node in nodes:
            place = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
            jobs.append(run.options(scheduling_strategy=place).remote(list(arguments)))
        for node, job in zip(nodes, jobs, strict=True):
            files.append(_save(folder, node, *ray.get(job)))
    return files


def _save(folder: Path, node: Mapping[str, Any], blocks: str, errors: str) -> Path | None:
    name = f"{node['NodeManagerHostname']}-{node['NodeID'][:8]}"
    if not blocks:
        print(f"warning: node {name} failed: {errors}", file=sys.stderr)
        return None
    path = folder / f"{name}.jsonl"
    path.write_text(blocks, encoding="utf-8")
    print(f"node {name}: {blocks.count(chr(10))} blocks", file=sys.stderr)
    return path


def run_here(arguments: list[str]) -> Blocks:
    """What a node does: the same command, its blocks back as text. Without answers it was cut
    short; blocks that failed in later rounds are no reason to lose the others."""
    with tempfile.TemporaryDirectory(prefix="moe-coord-node-") as folder:
        command = [sys.executable, "-P", "-m", "coordinator", *arguments, "--out", folder]
        seen = run_watched(command, ProcessTree(), StopSignals(), NODE_SECONDS)
        is_whole = (Path(folder) / ANSWERS).exists()
        text = (Path(folder) / BLOCKS).read_text(encoding="utf-8") if is_whole else ""
        return text, " / ".join([line for _, line in seen.error_lines][-N_ERROR_LINES:])


def with_whole_paths(arguments: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Arguments in which models have paths from the root: a node works in a folder of its own."""
    names = {str(path) for path in files}
    command, *others = arguments
    return [command, *[str(Path(text).absolute()) if text in names else text for text in others]]


def without(typed: Sequence[str], names: Sequence[str]) -> list[str]:
    """Arguments without these flags and their values."""
    kept: list[str] = []
    is_value = False
    for text in typed:
        if is_value:
            is_value = False
        elif text in names:
            is_value = True
        elif text.partition("=")[0] not in names:
            kept.append(text)
    return kept


if __name__ == "__main__":
    sys.exit(main())
