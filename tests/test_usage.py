"""Files of use counts: what is written is read, for the same model, and nothing else is."""

import json
from pathlib import Path

import pytest

from coordinator.command.flag_values import ConfigError
from coordinator.routing.usage import FORMAT, UsageCounts, read_hot_set, read_usage, write_usage


def fresh(fingerprint: str = "f00d") -> UsageCounts:
    return UsageCounts(fingerprint, n_layers=2, n_experts=4)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    usage = fresh()
    usage.counts.update({(0, 3): 2.0, (1, 0): 0.5})
    write_usage(tmp_path / "u.json", usage)
    assert read_usage(tmp_path / "u.json", fresh()).counts == usage.counts
    assert read_hot_set(tmp_path / "u.json", fresh()).counts == usage.counts
    assert [path.name for path in tmp_path.iterdir()] == ["u.json"]


def test_only_usage_may_be_missing(tmp_path: Path) -> None:
    assert read_usage(tmp_path / "none", fresh()).counts == {}
    with pytest.raises(ConfigError, match="--hot-set: expected a readable file"):
        read_hot_set(tmp_path / "none", fresh())


def content(**changed: object) -> str:
    return json.dumps({"format": FORMAT, "fingerprint": "f00d", "counts": {}} | changed)


BAD = {
    "nothing": "",
    "no JSON": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "another format": content(format="moe-coord usage 2"),
    "another model": content(fingerprint="beef"),
    "no counts": content(counts=None),
    "no experts": content(counts={"0": 3}),
    "a layer by name": content(counts={"first": {"0": 1}}),
    "a negative layer": content(counts={"-1": {"0": 1}}),
    "a layer too many": content(counts={"2": {"0": 1}}),
    "an expert too many": content(counts={"0": {"4": 1}}),
    "an endless number": content(counts={"9" * 5000: {"0": 1}}),
    "a count below 0": content(counts={"0": {"0": -1}}),
    "a count of text": content(counts={"0": {"0": "1"}}),
    "a count that is no number": content(counts={"0": {"0": float("nan")}}),
}


@pytest.mark.parametrize("case", BAD)
def test_nothing_else_is_read(tmp_path: Path, case: str) -> None:
    path = tmp_path / "u.json"
    path.write_text(BAD[case])
    for read, flag in ((read_usage, "--usage"), (read_hot_set, "--hot-set")):
        with pytest.raises(ConfigError) as caught:
            read(path, fresh())
        text = str(caught.value)
        assert text.startswith(f"{flag}: expected ")
        assert "give another file" in text
        assert "\n" not in text


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a readable file"):
        read_usage(tmp_path, fresh())
