import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.command.commands import (
    COMMANDS,
    CompletionCommand,
    EvalCommand,
    HelpCommand,
    MapCommand,
    SynthCommand,
    command_flags,
)
from coordinator.command.config import Config, shipped_model
from coordinator.command.flag_values import ConfigError
from coordinator.command.line import parse, prompt_text
from coordinator.command.sizes import PoolSize
from coordinator.command.trace_commands import ReplayCommand, TraceCommand

CORES = (0, 1)
ROOT = Path(__file__).parent.parent


def main_job(*arguments: str) -> Config:
    config = parse(arguments, CORES)
    assert isinstance(config, Config)
    return config


def test_nothing_typed_is_the_main_job_with_the_shipped_model() -> None:
    assert main_job() == Config()
    assert Config().model == shipped_model()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-p", "In the beginning", "-n", "5"], Config(prompt="In the beginning", max_tokens=5)),
        (["--prompt=-5 °C", "--json"], Config(prompt="-5 °C", json=True)),
        (["-p", "-"], Config(prompt="-")),
        (["-p", "- item one"], Config(prompt="- item one")),
        (["-m", "a b.gguf"], Config(model=Path("a b.gguf"))),
        (["--tokens", "5,77"], Config(prompt_tokens=(5, 77))),
        (["-p", "x", "--stop", "a", "--stop", "\n"], Config(prompt="x", stop=("a", "\n"))),
        (["--pool", "40%"], Config(pool=PoolSize(share=0.4))),
        (["--pool", "all"], Config(pool=PoolSize(share=1.0))),
        (["--memory", "1.5G"], Config(memory_bytes=3 << 29)),
        (["--io-workers", "0"], Config(io_workers=0)),
        (["--io-workers", "2", "--queue-depth", "1"], Config(io_workers=2, queue_depth=1)),
        (["--io-workers", "1", "--pin-cores"], Config(io_workers=1, pin_cores=True)),
        # what one setting implies for another
        (["--io-threads", "2"], Config(io_threads=2, io_workers=0)),
        (["--io-threads", "2", "--io-workers", "0"], Config(io_threads=2, io_workers=0)),
        (["--io-threads", "0", "--io-workers", "1"], Config(io_threads=0, io_workers=1)),
        (["--single-process"], Config(single_process=True, io_workers=0)),
        (
            ["--single-process", "--io-threads", "2"],
            Config(single_process=True, io_threads=2, io_workers=0),
        ),
        (["--core-plan", "split"], Config(core_plan="split", pin_cores=True)),
        (["--compute-threads", "8"], Config(compute_threads=8)),
        (["-p", "x", "-n", "5", "-n", "6"], Config(prompt="x", max_tokens=6)),
    ],
)
def test_main_job(arguments: list[str], expected: Config) -> None:
    assert main_job(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["map"], MapCommand()),
        (["map", "m.gguf", "--json"], MapCommand(Path("m.gguf"), json=True)),
        (["map", "--json", "m.gguf"], MapCommand(Path("m.gguf"), json=True)),
        (["trace", "t"], TraceCommand(Path("t"))),
        (["trace", "t", "u", "--json"], TraceCommand(Path("t"), Path("u"), json=True)),
        (["replay", "t"], ReplayCommand(Path("t"))),
        (
            ["replay", "t", "--pool", "5%,1M,all", "--policy", "lfu,slru", "--hot-set", "h"],
            ReplayCommand(
                Path("t"),
                (PoolSize(share=0.05), PoolSize(n_bytes=1 << 20), PoolSize(share=1.0)),
                ("lfu", "slru"),
                Path("h"),
            ),
        ),
        (
            ["calibrate", "m", "-p", "some text", "-n", "10", "--out", "h"],
            Config(model=Path("m"), prompt="some text", max_tokens=10, usage=Path("h")),
        ),
        (["help"], HelpCommand()),
        (["help", "cores"], HelpCommand("cores")),
        (["completion", "fish"], CompletionCommand("fish")),
        (["synth", "olmoe", "q2_k", "x"], SynthCommand("olmoe", "q2_k", Path("x"))),
        (
            ["synth", "qwen3moe-235b", "q4_k_m", "x", "--sparse", "--layers", "3", "--force"],
            SynthCommand("qwen3moe-235b", "q4_k_m", Path("x"), 3, sparse=True, force=True),
        ),
        (
            ["eval", "m", "--tokens", "5,77,300", "--out", "F.npz", "--io-threads", "2"],
            EvalCommand(
                Config(
                    model=Path("m"), prompt_tokens=(5, 77, 300), numerics="exact",
                    io_threads=2, io_workers=0,
                ),
                Path("F.npz"),
            ),
        ),
        (
            ["eval", "m", "--tokens", "5", "--out", "o", "--numerics", "fast"],
            EvalCommand(Config(model=Path("m"), prompt_tokens=(5,)), Path("o")),
        ),
    ],
)  # fmt: skip
def test_commands(arguments: list[str], expected: object) -> None:
    assert parse(arguments, CORES) == expected


# arguments, what the line begins with, something that it says
BAD_SETTINGS: list[tuple[list[str], str, str]] = [
    (["--top-p", "0"], "--top-p:", "above 0 and at most 1, found '0'"),
    (["--top-p", "1.01"], "--top-p:", "found '1.01'"),
    (["--top-p", "nan"], "--top-p:", "found 'nan'"),
    (["--temperature", "-0.1"], "--temperature:", "from 0 to 100"),
    (["--temperature", "nan"], "--temperature:", "found 'nan'"),
    (["--temperature", "inf"], "--temperature:", "found 'inf'"),
    (["--temperature", "1e308"], "--temperature:", "found '1e308'"),
    (["--temperature", "hot"], "--temperature:", "found 'hot'"),
    (["--temperature", ""], "--temperature:", "found ''"),
    (["--top-k", "-1"], "--top-k:", "found '-1'"),
    (["--top-k", "2.5"], "--top-k:", "an integer"),
    (["--min-p", "1.5"], "--min-p:", "from 0 to 1"),
    (["--repeat-penalty", "0"], "--repeat-penalty:", "above 0"),
    (["--seed", "-1"], "--seed:", "found '-1'"),
    (["--seed", str(2**63)], "--seed:", f"to {2**63 - 1}"),
    (["--seed", "9" * 5000], "--seed:", "..."),
    (["-n", "0"], "--max-tokens:", "from 1"),
    (["-n", "many"], "--max-tokens:", "found 'many'"),
    (["-n"], "--max-tokens:", "found none"),
    (["--max-tokens", "2147483648"], "--max-tokens:", "found '2147483648'"),
    (["-p", ""], "--prompt:", "some UTF-8 text"),
    (["-p", "a\0b"], "--prompt:", r"\x00"),
    (["-p", "caf\udce9"], "--prompt:", r"\udce9"),
    (["-p"], "--prompt:", "--flag=VALUE"),
    (["-p", "a", "-f", "b"], "--prompt:", "one source of the prompt"),
    (["-p", "a", "--tokens", "1"], "--prompt:", "--prompt and --tokens"),
    (["-f", "a", "--tokens", "1"], "--file:", "--file and --tokens"),
    (["-f", ""], "--file:", "a path"),
    (["--tokens", ""], "--tokens:", "token ids such as 5,77,300"),
    (["--tokens", "1,2,"], "--tokens:", "found '1,2,'"),
    (["--tokens", "1,-2"], "--tokens:", "found '1,-2'"),
    (["--stop", ""], "--stop:", "1 to 1000 bytes"),
    (["--stop", "x" * 2000], "--stop:", "xxx..."),
    (["--io-workers", "-1"], "--io-workers:", "from 0 to 64"),
    (["--io-workers", "65"], "--io-workers:", "found '65'"),
    (["--io-workers", "two"], "--io-workers:", "found 'two'"),
    (["--io-threads", "65"], "--io-threads:", "from 0 to 64"),
    (["--queue-depth", "0"], "--queue-depth:", "from 1 to 64"),
    (["--compute-threads", "0"], "--compute-threads:", "from 1"),
    (["--io-threads", "2", "--io-workers", "1"], "--io-threads:", "found --io-workers 1"),
    (["--single-process", "--io-workers", "2"], "--single-process:", "found --io-workers 2"),
    (["--queue-depth", "4", "--io-workers", "0"], "--queue-depth:", "found none"),
    (["--queue-depth", "4", "--single-process"], "--queue-depth:", "use --io-threads"),
    (["--queue-depth", "4", "--io-threads", "2"], "--queue-depth:", "expected I/O workers"),
    (["--core-plan", "compute=0,io=99"], "--core-plan:", "out of 0,1"),
    (["--core-plan", "everywhere"], "--core-plan:", "shared, split, last"),
    (["--core-plan", "compute"], "--core-plan:", "compute=0,io=1"),
    (["--core-plan", ""], "--core-plan:", "help cores"),
    (["--pin-cores", "--compute-threads", "3"], "--compute-threads:", "at most 2"),
    (["--core-plan", "split", "--compute-threads", "2"], "--compute-threads:", "at most 1"),
    (["--reader", "fast"], "--reader:", "one of auto, direct, buffered, mmap, willneed, populate"),
    (["--reader", "Direct"], "--reader:", "did you mean direct?"),
    (["--reader", "mmap", "--pool", "40%"], "--pool:", "found --reader mmap"),
    (["--reader", "populate", "--policy", "lru"], "--policy:", "found --reader populate"),
    (["--drop-cache", "maybe"], "--drop-cache:", "one of auto, yes, no"),
    (["--policy", "mru"], "--policy:", "did you mean lru?"),
    (["--prefetch", "next"], "--prefetch:", "one of auto, off"),
    (["--read-unit", "slab"], "--read-unit:", "one of expert, layer"),
    (["--pool", "0"], "--pool:", "800M"),
    (["--pool", "0%"], "--pool:", "40%"),
    (["--pool", "101%"], "--pool:", "found '101%'"),
    (["--pool", "most"], "--pool:", "or all"),
    (["--pool=-5M"], "--pool:", "found '-5M'"),
    (["--pool", "-5M"], "--pool:", "--flag=VALUE"),
    (["--memory", "lots"], "--memory:", "800M, 1.5G or 1048576"),
    (["--memory", "40%"], "--memory:", "found '40%'"),
    (["--memory", "1e9"], "--memory:", "found '1e9'"),
    (["--memory", "1G", "--pool", "2G"], "--pool:", "less than --memory 1.00 GiB"),
    (["--context", "0"], "--context:", "from 16"),
    (["--context", "1099511627776"], "--context:", "to 16777216"),
    (["--chunk", "100"], "--chunk:", "a multiple of 64"),
    (["--kv-type", "q4_0"], "--kv-type:", "one of auto, f32, f16, q8_0"),
    (["--mlock", "yes"], "--mlock:", "one of auto, require, off"),
    (["--dense", "mmap"], "--dense:", "one of auto, anonymous, mapped"),
    (["--numerics", "exakt"], "--numerics:", "did you mean exact?"),
    (["--kernels", "cuda"], "--kernels:", "one of auto, native, numpy"),
    (["--model", ""], "--model:", "a path"),
    (["--policy", "static"], "--policy:", "give --hot-set FILE"),
    (["--hot-set", "h", "--usage", "u"], "--usage:", "keep one"),
    (["calibrate", "m", "--out", "h"], "moe-coord calibrate:", "give -p TEXT, -f FILE or --tokens"),
    (["calibrate", "m", "-p", "x"], "moe-coord calibrate:", "expected --out"),
    (
        ["calibrate", "m", "-p", "x", "--out", "h", "--policy", "lru"],
        "moe-coord calibrate:",
        "--policy",
    ),
    (["replay", "t", "--pool", "10%,"], "--pool:", "10%,50% or 800M"),
    (["replay", "t", "--policy", "lru,mru"], "--policy:", "all, or some of lru"),
    (["replay"], "moe-coord replay:", "expected TRACE"),
    (["--trace", ""], "--trace:", "a path, found ''"),
    (["--port", "8080", "-p", "x"], "--port:", "drop the prompt"),
    (["--seed", "1"], "--seed:", "every request says it for itself"),
    (["--io-worker", "1"], "moe-coord:", "did you mean --io-workers?"),
    (["--io_workers", "1"], "moe-coord:", "did you mean --io-workers?"),
    (["--temprature=1"], "moe-coord:", "did you mean --temperature?"),
    (["--jsno"], "moe-coord:", "did you mean --json?"),
    (["--zzzzzzz"], "moe-coord:", "see moe-coord --help"),
    (["--\x1b[31m"], "moe-coord:", r"\x1b[31m"),
    (["-q"], "moe-coord:", "found '-q'"),
    (["--json=1"], "--json:", "expected no value, found '1'"),
    (["--pin-cores", "0,1"], "moe-coord:", "found '0,1'"),
    (["-n", "5", "model.gguf"], "moe-coord:", "found 'model.gguf'"),
    (["--json", "map", "m"], "moe-coord:", "a command comes first"),
    (["--", "-p"], "moe-coord:", "expected no further argument"),
    (["mapp"], "moe-coord:", "did you mean map?"),
    (["model.gguf"], "moe-coord:", "expected a command (map, plan, eval"),
    ([""], "moe-coord:", "found ''"),
    (["map", "a", "b"], "moe-coord map:", "found 'b'"),
    (["map", "--pool", "all"], "moe-coord map:", "found '--pool'"),
    (["map", "--jsn"], "moe-coord map:", "did you mean --json?"),
    (["eval", "m", "--tokens", "1"], "moe-coord eval:", "expected --out too, found none"),
    (["eval", "m", "--out", "o"], "moe-coord eval:", "--tokens"),
    (["eval"], "moe-coord eval:", "MODEL"),
    (["eval", "m", "--tokens", "1", "--out", "o", "-n", "5"], "moe-coord eval:", "found '-n'"),
    (["eval", "m", "--tokens", "x", "--out", "o"], "--tokens:", "token ids"),
    (["synth", "olmo", "q4_k_m", "x"], "SHAPE:", "did you mean olmoe?"),
    (["synth", "olmoe", "q5", "x"], "MIX:", "one of q4_k_m"),
    (["synth", "olmoe", "q4_k_m"], "moe-coord synth:", "expected OUT too"),
    (["synth", "olmoe", "q4_k_m", "x", "--layers", "0"], "--layers:", "from 1 to 1024"),
    (["help", "memroy"], "TOPIC:", "did you mean memory?"),
    (["completion", "tcsh"], "SHELL:", "one of bash, zsh, fish"),
    (["completion"], "moe-coord completion:", "expected SHELL too"),
]


BAD_IDS = [f"{number} {start}" for number, (_, start, _) in enumerate(BAD_SETTINGS)]


@pytest.mark.parametrize(("arguments", "start", "part"), BAD_SETTINGS, ids=BAD_IDS)
def test_a_bad_setting_is_refused_in_one_line(arguments: list[str], start: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(arguments, CORES)
    line = str(caught.value)
    assert line.startswith(start), line
    assert part in line
    assert "expected " in line
    assert "found " in line
    assert ";" in line, "what to do is missing"
    assert line.isprintable()
    assert len(line) < 400


def test_there_are_enough_of_them_and_none_twice() -> None:
    assert len(BAD_SETTINGS) >= 60
    assert len({tuple(arguments) for arguments, _, _ in BAD_SETTINGS}) == len(BAD_SETTINGS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--top-p", "7"],
        ["--core-plan", "compute=99"],
        ["--io-threads", "2", "--io-workers", "1", "--model", "/none.gguf"],
        ["--polici", "lru"],
        ["maap"],
        ["-f", "/nowhere/at/all"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_program_says_it_and_exits_with_2(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "coordinator", *arguments], capture_output=True, text=True,
        check=False, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "expected " in done.stderr


def test_bad_settings_are_refused_before_numpy_is_loaded() -> None:
    script = (
        "import sys\nfrom coordinator.command.line import parse\n"
        "parse(['-p', 'x'])\nprint('numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_names_every_flag(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--help"] if command is None else [command, "--help"]
    with pytest.raises(SystemExit) as caught:
        parse(arguments, CORES)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for _, flag in command_flags(command):
        shown = all(name in text for name in flag.names)
        assert shown == flag.is_ready
    if command is None:
        assert all(name in text for name in COMMANDS)
        assert "memory:" in text
        assert "%%" not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--version"], CORES)
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("moe-coord ")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"In the beginning", "In the beginning"),
        (b"two\nlines\n", "two\nlines"),
        (b"dos\r\n", "dos"),
        ("世界\n\n".encode(), "世界\n"),
    ],
)
def test_a_prompt_from_a_file_or_standard_input(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "ü prompt.txt"
    path.write_bytes(data)
    assert prompt_text(Config(prompt_file=path), io.BytesIO()) == text
    assert prompt_text(Config(prompt="-"), io.BytesIO(data)) == text


def test_a_prompt_that_was_typed_or_none() -> None:
    assert prompt_text(Config(prompt="x\n"), io.BytesIO(b"y")) == "x\n"
    assert prompt_text(Config(), io.BytesIO(b"y")) is None


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "--prompt -: expected some text, found none"),
        (b"\n", "expected some text, found none"),
        (b"caf\xe9", "found byte 0xe9 at 3"),
        (b"x" * (16 * 1024 * 1024 + 1), "at most 16777216 bytes"),
    ],
    ids=["empty", "line end", "latin-1", "huge"],
)
def test_bad_standard_input(data: bytes, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prompt_text(Config(prompt="-"), io.BytesIO(data))
    assert part in str(caught.value)


def test_bad_prompt_files(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError) as caught:
            prompt_text(Config(prompt_file=path), io.BytesIO())
        assert str(caught.value).startswith("--file: expected a readable file, found ")
        assert reason in str(caught.value)
