"""Counts per expert from an importance matrix."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from imatrix_builder import write_imatrix

from coordinator.command.flag_values import ConfigError
from coordinator.routing.imatrix import read_imatrix
from coordinator.routing.usage import UsageCounts

N_LAYERS, N_EXPERTS = 3, 4


def fresh() -> UsageCounts:
    return UsageCounts("f00d", N_LAYERS, N_EXPERTS)


def test_counts_of_every_layer_that_has_some(tmp_path: Path) -> None:
    path = write_imatrix(
        tmp_path / "i.gguf",
        {
            "blk.0.attn_q.weight": [512.0],
            "blk.0.ffn_down_exps.weight": [1.0, 2.0, 0.0, 4.0],
            "blk.2.ffn_up_exps.weight": [0.0, 7.0, 0.0, 0.0],
            "blk.2.ffn_gate_exps.weight": [9.0, 9.0, 9.0, 9.0],  # the same counts, in a real file
        },
    )
    found = read_imatrix(path, fresh()).counts
    assert found == {(0, 0): 1.0, (0, 1): 2.0, (0, 3): 4.0, (2, 1): 7.0}


@pytest.mark.parametrize(
    ("counts", "part"),
    [
        ({"blk.0.attn_q.weight": [512.0]}, "none for the layers of this model"),
        ({"blk.7.ffn_up_exps.weight": [1.0] * N_EXPERTS}, "none for the layers of this model"),
        ({"blk.0.ffn_up_exps.weight": [1.0] * 5}, "it is of another model"),
        ({"blk.0.ffn_up_exps.weight": [1.0, -1.0, 0.0, 0.0]}, "found -1"),
        ({"blk.0.ffn_up_exps.weight": [1.0, float("nan"), 0.0, 0.0]}, "found nan"),
        ({"blk.0.ffn_up_exps.weight": [0.0] * N_EXPERTS}, "none for the layers of this model"),
    ],
)
def test_what_is_of_no_use_is_refused(
    tmp_path: Path, counts: Mapping[str, list[float]], part: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_imatrix(write_imatrix(tmp_path / "i.gguf", counts), fresh())
    assert str(caught.value).startswith("--imatrix: expected ")
    assert part in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x05\0\0\0\x18\0\0\0blk.0.ffn_down_exps.weight", b"GGUF"])
def test_other_files_are_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "i.dat"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_imatrix(path, fresh())
    text = str(caught.value)
    assert "\n" not in text
    if data != b"GGUF":
        assert "not tokens per expert" in text
        assert "--output-format gguf" in text


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a readable file"):
        read_imatrix(tmp_path / "none", fresh())
