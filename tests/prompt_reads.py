"""How often a prompt reads its experts: ``python tests/prompt_reads.py MODEL --memory 1160M …``.

Runs a prompt with its routing recorded. A `Need` has each expert of a layer and chunk once, and
each of its misses is one read; so an expert is read at most once per layer and chunk if the run
asked for as many experts as the trace has, and read no more than the misses. Prints one JSON
object; ends with 1 if that is not so. Other flags go to the run; what prefetch reads ahead is no
miss, so `--prefetch off` belongs to them.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from arms import PROGRAM, spelled

from coordinator.routing.trace_file import of_steps, read_trace

FEW_IDS = 300  # every vocabulary here has more


@dataclass(frozen=True, slots=True)
class PromptReads:
    """Of the prompt alone. Experts are counted once per layer and chunk that needs them."""

    n_tokens: int
    n_chunks: int
    n_needed: int  # experts in the trace
    n_requests: int  # experts that the run counted
    n_misses: int
    bytes_read: int
    bytes_needed: int  # of the experts in the trace
    largest_slab_bytes: int
    seconds: float

    @property
    def at_most_once(self) -> bool:
        """Whether no expert was read twice for one layer and chunk."""
        is_counted = self.n_requests == self.n_needed and self.n_misses <= self.n_requests
        most_bytes = min(self.bytes_needed, self.n_misses * self.largest_slab_bytes)
        return is_counted and self.bytes_read <= most_bytes


def prompt_reads(model: Path, tokens: Sequence[int], flags: Sequence[str]) -> PromptReads:
    """Run the prompt and one token. Raises `RuntimeError` if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        trace_path = Path(folder) / "trace"
        command = [*PROGRAM, "--model", str(model), "--tokens", spelled(list(tokens)), "-n", "1"]
        command += ["--trace", str(trace_path), "--json", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        trace = read_trace(trace_path)
    record = json.loads(done.stdout)
    slab_bytes = {layer.layer: layer.slab_bytes for layer in trace.header.slab_table().layers}
    experts = record["experts"]
    return PromptReads(
        n_tokens=record["prompt_tokens"],
        n_chunks=sum(1 for _ in of_steps(trace.needs)),
        n_needed=sum(len(need.experts) for need in trace.needs),
        n_requests=experts["requests"],
        n_misses=experts["misses"],
        bytes_read=experts["bytes_read"],
        bytes_needed=sum(len(need.experts) * slab_bytes[need.layer] for need in trace.needs),
        largest_slab_bytes=max(slab_bytes.values()),
        seconds=record["timings"]["prompt_s"],
    )


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--ids-below", type=int, default=FEW_IDS, help="of the vocabulary")
    options, flags = parser.parse_known_args()
    draw = random.Random(0)
    tokens = [draw.randrange(options.ids_below) for _ in range(options.prompt_tokens)]
    found = prompt_reads(options.model, tokens, flags)
    print(json.dumps({**asdict(found), "at_most_once": found.at_most_once}))
    return 0 if found.at_most_once else 1


if __name__ == "__main__":
    sys.exit(main())
