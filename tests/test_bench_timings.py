"""Which tokens count, and how the answers of the programs are read."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.bench.arms import arm_command, check_arm, read_arm
from coordinator.bench.peer import (
    llama_bench_command,
    llama_server_command,
    peer_of,
    read_llama_bench,
    read_llama_server,
)
from coordinator.bench.timings import BlockError, Span, measured
from coordinator.command.bench_commands import Arm, BenchCommand, PeerCommand
from coordinator.command.flag_values import ConfigError
from coordinator.processes.program import Watched

EIGHTS = tuple(Span(8, seconds, start) for seconds, start in ((9, 0), (2, 10), (3, 20), (5, 30)))


def singles(n: int) -> tuple[Span, ...]:
    return tuple(Span(1, 0.5, 0.5 * number) for number in range(n))


@pytest.mark.parametrize(
    ("spans", "n_warm_up", "n_tokens", "seconds", "start", "stop"),
    [
        (singles(10), 4, 6, 3.0, 2.0, 5.0),
        (singles(10), 0, 10, 5.0, 0.0, 5.0),
        (singles(10), 2, 3, 1.5, 1.0, 2.5),
        (EIGHTS, 8, 24, 10.0, 10.0, 35.0),
        (EIGHTS, 16, 16, 8.0, 20.0, 35.0),
        (singles(3), 0, 0, 0.0, 0.0, 0.0),
    ],
)
def test_warm_up_is_left_out(
    spans: tuple[Span, ...],
    n_warm_up: int,
    n_tokens: int,
    seconds: float,
    start: float,
    stop: float,
) -> None:
    found = measured(spans, n_warm_up, n_tokens)
    assert (found.n_tokens, found.seconds) == (n_tokens, seconds)
    assert (found.start, found.stop) == (start, stop)
    assert found.tokens_per_second == (n_tokens / seconds if seconds else 0.0)


@pytest.mark.parametrize(
    ("spans", "n_warm_up", "n_tokens"),
    [(singles(9), 4, 6), (EIGHTS, 4, 24), (EIGHTS, 8, 20), (EIGHTS, 8, 32), ((), 0, 1)],
)
def test_a_share_of_a_span_is_refused(
    spans: tuple[Span, ...], n_warm_up: int, n_tokens: int
) -> None:
    with pytest.raises(BlockError, match="expected"):
        measured(spans, n_warm_up, n_tokens)


def test_our_json() -> None:
    record: dict[str, Any] = {
        "tokens": [7, 8, 9],
        "timings": {
            "token_s": [2.0, 0.5, 0.25],
            "started_monotonic_s": 100.0,
            "compute_s": 0.1,
            "experts_s": 0.04,
            "wait_disk_s": 0.2,
            "coordination_s": 0.3,
        },
        **{key: {} for key in ("experts", "prefetch", "memory", "faults", "settings")},
        "stop_reason": "length",
    }
    found = read_arm(Watched(output=json.dumps(record).encode()), 5)
    assert found.prompt == Span(5, 2.0, 100.0)
    assert found.spans == (Span(1, 0.5, 102.0), Span(1, 0.25, 102.5))
    assert found.tokens == (7, 8, 9)
    for output in (b"", b"{}", b"[1]", json.dumps(record).encode()[:-9]):
        with pytest.raises(BlockError, match="JSON"):
            read_arm(Watched(output=output), 5)


def test_our_command_is_what_was_typed_and_the_prompt() -> None:
    command = arm_command(Arm("a", ("--io-workers", "2")), Path("m.gguf"), [3, 4], 41, 9)
    assert command[1:4] == ["-P", "-m", "coordinator"]
    assert " ".join(command[4:]) == (
        "--model m.gguf --io-workers 2 --tokens 3,4 -n 41 --ignore-eos --temperature 1 "
        "--seed 9 --json"
    )


@pytest.mark.parametrize("flags", [("--no-such",), ("-p", "text"), ("map",), ("--pool", "x")])
def test_flags_that_the_program_refuses(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--arm 'a'"):
        check_arm(Arm("a", flags))
    check_arm(Arm("a", ("--io-workers", "2", "--queue-depth", "2")))


def bench(**settings: Any) -> BenchCommand:
    return BenchCommand((Path("m.gguf"),), **settings)


PEER = PeerCommand("llama.cpp", ("/opt/llama-bench", "-t", "2"))


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({}, "-d 8 -p 0 -n 8 -r 5"),
        ({"n_warm_up": 16, "n_tokens": 32, "n_prompt": 4}, "-d 4 -p 0 -n 16 -r 3"),
        ({"n_warm_up": 0, "n_tokens": 24}, "-d 8 -p 0 -n 24 -r 1"),
        ({"n_warm_up": 0, "n_tokens": 1}, "-d 8 -p 0 -n 1 -r 1"),
        ({"n_tokens": 0, "n_prompt": 512}, "-p 512 -n 0 -r 2"),
        ({"n_tokens": 0, "n_prompt": 64, "n_warm_up": 0}, "-p 64 -n 0 -r 1"),
    ],
)
def test_how_llama_bench_is_asked(settings: dict[str, Any], end: str) -> None:
    command = llama_bench_command(PEER, bench(**settings), (1, 2), 1)
    assert " ".join(command) == (
        f"/opt/llama-bench -t 2 -m m.gguf --no-warmup --progress -o json {end}"
    )


def test_lengths_without_a_common_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="common divisor"):
        llama_bench_command(PEER, bench(n_warm_up=16, n_tokens=25), (1, 2), 1)
    with pytest.raises(ConfigError, match="llama-bench"):
        peer_of(PeerCommand("x", ("/bin/true",)))


def answer(n_prompt: int, n_gen: int, samples_ns: list[int]) -> bytes:
    record = {"n_prompt": n_prompt, "n_gen": n_gen, "samples_ns": samples_ns, "n_threads": 2}
    return json.dumps([record]).encode()


def test_how_llama_bench_is_read() -> None:
    lines = [(1.0, "llama-bench: benchmark 1/1: starting")]
    lines += [
        (float(10 * number), f"llama-bench: benchmark 1/1: generation run {number}/3")
        for number in (1, 2, 3)
    ]
    lines.insert(1, (1.5, "llama-bench: benchmark 1/1: depth run 1/3"))
    seen = Watched(output=answer(0, 8, [4_000_000_000, 2_000_000_000, 1_000_000_000]))
    seen.error_lines = lines
    found = read_llama_bench(seen, bench(n_warm_up=8, n_tokens=16))
    assert found.spans == (Span(8, 4.0, 10.0), Span(8, 2.0, 20.0), Span(8, 1.0, 30.0))
    assert found.prompt is None
    assert found.report == {"n_threads": 2}
    seen.error_lines = lines[:-1]
    with pytest.raises(BlockError, match="progress"):
        read_llama_bench(seen, bench(n_warm_up=8, n_tokens=16))


def test_the_second_prompt_counts() -> None:
    seen = Watched(output=answer(64, 0, [9_000_000_000, 2_000_000_000]))
    seen.error_lines = [
        (float(number), f"llama-bench: benchmark 1/1: prompt run {number}/2") for number in (1, 2)
    ]
    found = read_llama_bench(seen, bench(n_tokens=0, n_prompt=64))
    assert found.prompt == Span(64, 2.0, 2.0)
    assert found.spans == ()


@pytest.mark.parametrize("output", [b"", b"[]", b"{}", b"[{}, {}]", b'[{"n_gen": 3}]'])
def test_other_output_is_refused(output: bytes) -> None:
    with pytest.raises(BlockError, match="llama-bench"):
        read_llama_bench(Watched(output=output), bench())


def test_a_server_is_asked_for_our_prompt() -> None:
    peer = PeerCommand("s", ("/opt/llama-server", "-t", "2"))
    command = llama_server_command(peer, bench(n_warm_up=4, n_tokens=8), (3, 4), 9)
    assert " ".join(command[1:]) == (
        "-P -m coordinator.bench.llama_server --model m.gguf --tokens 3,4 --n 13 --seed 9 -- "
        "/opt/llama-server -t 2"
    )


def test_arrivals_of_a_server() -> None:
    arrivals = [[1, 2.0], [1, 0.5], [2, 0.75], [1, 0.25]]
    output = json.dumps({"started_monotonic_s": 100.0, "arrivals": arrivals}).encode()
    found = read_llama_server(Watched(output=output), bench(n_prompt=5))
    assert found.prompt == Span(5, 2.0, 100.0)
    assert found.spans == (Span(1, 0.5, 102.0), Span(2, 0.75, 102.5), Span(1, 0.25, 103.25))
    for bad in (b"", b"{}", b'{"arrivals": []}'):
        with pytest.raises(BlockError, match="arrivals"):
            read_llama_server(Watched(output=bad), bench())
