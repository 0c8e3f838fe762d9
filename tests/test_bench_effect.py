"""A fake effect is found in a real run: every read of one arm takes 2 ms longer."""

import sys
from dataclasses import replace
from pathlib import Path

from coordinator.bench.answers import Answer, answer_of
from coordinator.bench.arms import arm_command, read_arm
from coordinator.bench.bench import prompt_of_round
from coordinator.bench.block import Participant, Place, run_block
from coordinator.bench.questions import Pair, Sweep
from coordinator.bench.records import Record
from coordinator.bench.rooms import Room
from coordinator.bench.rounds import Step, TimeLimit, run_rounds
from coordinator.command.bench_commands import Arm, BenchCommand
from coordinator.command.config import shipped_model
from coordinator.command.signals import StopSignals
from coordinator.processes.group import Limits

ROOM = Room("20% of the experts in the pool", ("--pool", "20%"))
PROGRAM = [sys.executable, "-P", str(Path(__file__).parent / "slow_reader.py")]
BENCH = BenchCommand((shipped_model(),), n_tokens=12, n_warm_up=2, n_prompt=4, keep_cache=True)
SWEEP = Sweep("arms", (), (Pair("the slow reader", "the other", "slow", "plain"),))


def participant(name: str, milliseconds: float) -> Participant:
    flags = ("--single-process", "--compute-threads", "1", *ROOM.flags)

    def command(room: Room, prompt: object, seed: int) -> list[str]:
        ids = [int(token) for token in prompt]  # type: ignore[attr-defined]
        whole = arm_command(Arm(name, flags), BENCH.model, ids, BENCH.n_generated, seed)
        return [*PROGRAM, str(milliseconds), *whole[4:]]  # behind python -P -m coordinator

    return Participant(name, "test", command, lambda seen: read_arm(seen, BENCH.n_prompt))


def compared(who: list[Participant], n_rounds: int, seed: int = 1) -> Answer:
    bench = replace(BENCH, seed=seed)
    common = {"comparison": "test", "settings": {}, "machine": {}}
    place = Place(bench, ROOM, (bench.model,), Limits(), 1 << 20, common)

    def run(step: Step, deadline: float | None) -> Record | None:
        n_round, _, each = step
        prompt = prompt_of_round(bench, n_round, 300)
        return run_block(each, prompt, n_round, place, StopSignals())

    records = list(run_rounds((ROOM,), who, n_rounds, (), TimeLimit(), run))
    assert not [record for record in records if "error" in record], records[0]
    return answer_of(records, SWEEP, (ROOM,), 1 << 30)


def test_a_reader_that_sleeps_is_found() -> None:
    answer = compared([participant("plain", 0), participant("slow", 2)], 6)
    (found,) = answer.claims[0].findings
    assert found.verdict == "less" and found.ratio is not None
    assert found.ratio.high is not None and found.ratio.high < 1
    assert "as fast as the other" in answer.headline
