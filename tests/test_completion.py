"""The scripts are tried in the shells themselves; one that is not installed is skipped by name."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from coordinator.command.commands import COMMANDS, SHELLS, command_flags
from coordinator.command.completion import completion_script

# what is typed (the last word is the one to complete) -> some of the offers, something not offered
CASES: list[tuple[list[str], set[str], str]] = [
    (["--rea"], {"--reader", "--read-unit"}, "--pool"),
    (["--reader", "d"], {"direct"}, "buffered"),
    (["--policy", ""], {"lru", "layer-lru", "lfu", "slru", "static", "calibrated"}, "--json"),
    (["--model", ""], {"c.gguf", "a b.gguf"}, "map"),
    (["ma"], {"map"}, "synth"),
    (["map", ""], {"c.gguf", "a b.gguf"}, "eval"),
    (["map", "--j"], {"--json"}, "--help"),
    (["synth", "q"], {"qwen3moe", "qwen3moe-235b"}, "q4_k_m"),
    (["synth", "olmoe", "q"], {"q4_k_m", "q2_k"}, "qwen3moe"),
    (["help", "c"], {"cores"}, "memory"),
    (["completion", "z"], {"zsh"}, "bash"),
    (["eval", "x", "--num"], {"--numerics"}, "--seed"),
]


def shell(name: str) -> str:
    """Path of a shell. Without it the test is skipped; on CI a skip is a failure."""
    path = shutil.which(name)
    if path is None and os.environ.get("CI") == "true":
        pytest.fail(f"the Debian package {name} is missing: `make ci-deps` installs it")
    if path is None:
        pytest.skip(f"needs the Debian package {name}")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a b.gguf", "c.gguf"):
        (tmp_path / name).touch()
    return tmp_path


def run(command: list[str], folder: Path, script: str) -> list[str]:
    done = subprocess.run(
        command, input=script, capture_output=True, text=True, check=True, cwd=folder, timeout=30,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"},
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(("words", "offered", "other"), CASES, ids=[" ".join(c[0]) for c in CASES])
def test_bash(folder: Path, words: list[str], offered: set[str], other: str) -> None:
    quoted = " ".join(f"'{word}'" for word in words)
    script = (
        f"{completion_script('bash')}\nCOMP_WORDS=(moe-coord {quoted})\n"
        f"COMP_CWORD={len(words)}\n_moe_coord\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    )
    found = run([shell("bash"), "--norc"], folder, script)
    assert offered <= set(found)
    assert other not in found


@pytest.mark.parametrize(("words", "offered", "other"), CASES, ids=[" ".join(c[0]) for c in CASES])
def test_fish(folder: Path, words: list[str], offered: set[str], other: str) -> None:
    (folder / "script.fish").write_text(completion_script("fish"))
    script = f"source script.fish; complete -C 'moe-coord {' '.join(words)}'"
    found = run([shell("fish"), "--no-config", "-c", script], folder, "")
    offers = {line.split("\t")[0] for line in found}
    assert offered <= offers
    assert other not in offers


def test_bash_completes_after_an_equals_sign(folder: Path) -> None:
    script = (
        f"{completion_script('bash')}\nCOMP_WORDS=(moe-coord --reader = b)\nCOMP_CWORD=3\n"
        '_moe_coord\necho "${COMPREPLY[@]}"\n'
    )
    assert run([shell("bash"), "--norc"], folder, script) == ["buffered"]


def test_zsh_takes_the_script(folder: Path) -> None:
    (folder / "script.zsh").write_text(completion_script("zsh"))
    script = "autoload -U compinit; compinit -u -D; source script.zsh; print $_comps[moe-coord]"
    assert run([shell("zsh"), "-f", "-c", script], folder, "") == ["_moe_coord"]


@pytest.mark.parametrize("name", SHELLS)
def test_every_ready_flag_of_every_command_is_in_every_script(name: str) -> None:
    script = completion_script(name)
    for command in (None, *COMMANDS):
        for _, flag in command_flags(command):
            if not flag.is_positional:
                spelled = f"-l {flag.name[2:]} " if name == "fish" else flag.name
                assert (spelled in script) == flag.is_ready, flag.name
