"""Other programs in the same comparison: same rounds, same threads, same table; their tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_peer import TOKEN_SECONDS
from running_program import wait_until

from coordinator.bench.bench import run_bench
from coordinator.bench.records import read_blocks
from coordinator.bench.tokens import common_prefix, compared_tokens
from coordinator.command.bench_commands import POOLS, Arm, BenchCommand, PeerCommand
from coordinator.command.config import shipped_model
from coordinator.command.signals import StopSignals
from coordinator.processes.engine import EngineError

TOKEN_RATES = 0.1 / TOKEN_SECONDS, 3 / TOKEN_SECONDS  # a busy machine; one that read late
FAKE = Path(__file__).parent / "fake_peer.py"


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, PeerCommand]:
    """Known by their file names, as the real ones are."""
    found = {}
    for kind in ("bench", "server"):
        path = tmp_path / f"llama-{kind}"
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} {kind} "$@"\n')
        path.chmod(0o755)
        found[kind] = PeerCommand(f"peer-{kind}", (str(path),))
    return found


def test_peers_stand_in_the_table_of_a_question(
    programs: dict[str, PeerCommand], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    bench = BenchCommand(
        (shipped_model(),), question="memory", peers=tuple(programs.values()), n_pairs=1,
        n_tokens=8, n_warm_up=4, keep_cache=True, out=out, pools=POOLS.parse("30%"),
        compute_threads=1,
    )  # fmt: skip
    assert run_bench(bench) == 0
    arms = {record["arm"]: record for record in read_blocks(out / "blocks.jsonl")}
    assert set(arms) == {"prefetch-off", "prefetch-router", "peer-bench", "peer-server"}
    assert arms["peer-bench"]["tok_s"] == pytest.approx(1 / TOKEN_SECONDS)  # its own figure
    assert TOKEN_RATES[0] < arms["peer-server"]["tok_s"] < TOKEN_RATES[1]  # measured
    for name in ("peer-bench", "peer-server"):
        assert arms[name]["command"].count("-t") == 1  # as many threads as our arms
        assert arms[name]["faults"]["minor"] > 0  # a peer does not tell its own
    assert arms["peer-bench"]["report"]["n_threads"] == 1
    assert arms["peer-server"]["report"]["build_info"] == "b1-fake"
    claims = json.loads((out / "answers.json").read_text())["claims"]
    assert [claim["findings"][0]["reference"] for claim in claims[-2:]] == [
        "peer-bench", "peer-server",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "peer-server: of 16 greedy tokens the first " in said


def test_a_block_that_failed_is_told_and_measured_again(tmp_path: Path) -> None:
    """In its second round; the results are written all the same."""
    path, runs, out = tmp_path / "llama-bench", tmp_path / "runs", tmp_path / "out"
    path.write_text(
        f"#!/bin/sh\necho >> {runs}\n[ $(wc -l < {runs}) = 2 ] && exit 9\n"
        f'exec {sys.executable} {FAKE} bench "$@"\n'
    )
    path.chmod(0o755)
    bench = BenchCommand(
        (shipped_model(),), arms=(Arm("ours", ("--compute-threads", "1")),),
        peers=(PeerCommand("peer", (str(path),)),), n_pairs=2, n_tokens=8, n_warm_up=4,
        keep_cache=True, out=out,
    )  # fmt: skip
    with pytest.raises(EngineError, match=r"1 of 4 blocks failed \(peer\).*exit 9") as failure:
        run_bench(bench)
    assert failure.value.exit_code == 5
    (claim,) = json.loads((out / "answers.json").read_text())["claims"]
    assert claim["findings"][0]["n_pairs"] == 1
    assert run_bench(bench) == 0
    (claim,) = json.loads((out / "answers.json").read_text())["claims"]
    assert claim["findings"][0]["n_pairs"] == 2


def test_tokens_are_compared_where_there_are_some(programs: dict[str, PeerCommand]) -> None:
    stop = StopSignals()
    model, prompts, flags = shipped_model(), [(5, 77), (6,)], ("--compute-threads", "1")
    lines = compared_tokens(list(programs.values()), model, prompts, flags, 60, stop)
    for name, line in zip(("peer-bench (the llama-server beside it)", "peer-server"), lines,
                          strict=True):  # fmt: skip
        assert line.startswith(f"{name}: of 16 greedy tokens the first 0 and 0 equal")
    Path(programs["server"].command[0]).unlink()
    (line,) = compared_tokens([programs["bench"]], model, prompts, flags, 60, stop)
    assert line.startswith("peer-bench: tokens were not compared: llama-bench draws ids of its own")
    gone = PeerCommand("gone", (os.devnull + "/llama-server",))
    (line,) = compared_tokens([gone], model, prompts, flags, 60, stop)
    assert line == "gone: tokens were not compared: a run gave none"


def test_a_server_ends_with_who_asks_it(tmp_path: Path) -> None:
    """It would go on beside the next block, and keep its memory."""
    note = tmp_path / "note"
    program = f"import time; open({str(note)!r}, 'w').close(); time.sleep(99)"
    asking = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "coordinator.bench.llama_server", "--model", "m"),
            *("--tokens", "1", "--n", "1", "--", sys.executable, "-c", program),
        ],
        stderr=subprocess.PIPE,
    )
    wait_until(note.exists)
    asking.kill()
    asking.communicate(timeout=60)  # returns when nobody has its standard error any more


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [([], [], 0), ([1], [], 0), ([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([9], [1], 0)],
)
def test_common_prefix(one: list[int], other: list[int], expected: int) -> None:
    assert common_prefix(one, other) == expected
