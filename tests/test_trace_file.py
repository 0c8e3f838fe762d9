"""The trace file: what was written is read, with numpy too, and nothing else is."""

import json
from pathlib import Path

import numpy as np
import pytest

from coordinator.command.flag_values import ConfigError
from coordinator.routing.trace_file import (
    HEADER_BYTES,
    RECORD,
    TraceHeader,
    create_trace,
    is_prompt,
    of_steps,
    read_trace,
    trace_header,
)
from shm.messages import ExpertUse, Need, SlotLease

HEADER = TraceHeader("f00d", 8, 2, (0, 1, 3), ((10, 10, 10), (10, 10, 20)), (1, 0, 0))
PROMPT_NEED = Need(1, 0, (ExpertUse(2, 90, 60), ExpertUse(5, 10, 4)), (), ())
NEEDS = (
    PROMPT_NEED,
    Need(1, 1, (ExpertUse(0, 100, 64), ExpertUse(1, 100, 64)), (), ()),
    Need(1, 3, (ExpertUse(1, 100, 64), ExpertUse(7, 100, 64)), (), ()),
    Need(2, 0, (ExpertUse(2, 1, 0), ExpertUse(3, 1, 0)), (7, 6), ()),
    Need(2, 1, (ExpertUse(6, 1, 0), ExpertUse(7, 1, 0)), (1, 0), ()),
    Need(2, 3, (ExpertUse(0, 1, 0), ExpertUse(1, 1, 0)), (), ()),
)
DTYPE = [
    ("step", "<u4"), ("layer", "<u2"), ("expert", "<u2"), ("tokens", "<u2"), ("recent", "u1"),
    ("kind", "u1"),
]  # fmt: skip


def written(path: Path) -> Path:
    writer = create_trace(path, HEADER)
    for need in NEEDS:
        writer.add(need)
    writer.close()
    assert writer.failure is None
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t"))
    assert trace.header == HEADER
    assert trace.needs == NEEDS
    assert [len(step) for step in of_steps(trace.needs)] == [3, 3]
    assert [is_prompt(need) for need in trace.needs] == [True] * 3 + [False] * 3


def test_what_was_released_is_no_part_of_it(tmp_path: Path) -> None:
    writer = create_trace(tmp_path / "t", HEADER)
    writer.add(Need(1, 0, (ExpertUse(1, 1, 0),), (), (SlotLease(3, 4),)))
    writer.close()
    assert read_trace(tmp_path / "t").needs[0].released == ()


def test_numpy_reads_it_in_one_line(tmp_path: Path) -> None:
    rows = np.fromfile(written(tmp_path / "t"), DTYPE, offset=HEADER_BYTES)
    assert len(rows) == 12 + 4
    prompt = rows[rows["kind"] == 1]
    assert prompt["tokens"].tolist() == [90, 10, 100, 100, 100, 100]
    guesses = rows[rows["kind"] == 2]
    assert guesses["layer"].tolist() == [1, 1, 3, 3]
    assert guesses["expert"].tolist() == [7, 6, 1, 0]


@pytest.mark.parametrize("n_cut", [1, 5, 11])
def test_a_cut_record_is_left_out(tmp_path: Path, n_cut: int) -> None:
    path = written(tmp_path / "t")
    path.write_bytes(path.read_bytes()[:-n_cut])
    found = read_trace(path).needs
    assert found[:-1] == NEEDS[:-1]
    assert found[-1].experts == NEEDS[-1].experts[:-1]


def test_whole_steps_are_there_while_it_is_written(tmp_path: Path) -> None:
    writer = create_trace(tmp_path / "t", HEADER)
    for need in NEEDS:
        writer.add(need)
    assert read_trace(tmp_path / "t").needs == NEEDS[:3]
    writer.close()


def test_a_full_disk_ends_the_trace_and_not_the_run() -> None:
    writer = create_trace(Path("/dev/full"), HEADER)
    for need in NEEDS:
        writer.add(need)
    writer.close()
    assert writer.failure is not None


def test_layers_of_a_model_come_back_as_a_slab_table() -> None:
    table = HEADER.slab_table()
    assert [layer.range_bytes for layer in table.layers] == [
        (10, 10, 20),
        (10, 10, 10),
        (10, 10, 10),
    ]
    assert trace_header("f00d", 2, table) == HEADER


def record(*fields: int) -> bytes:
    return RECORD.pack(*fields)


def header_with(**changed: object) -> bytes:
    fields = {
        "format": "moe-coord trace 1", "fingerprint": "f00d", "n_experts": 8, "n_active": 2,
        "layers": [0, 1], "slab_kinds": [[1, 1, 1]], "kind_of_layer": [0, 0],
    }  # fmt: skip
    return json.dumps(fields | changed).encode().ljust(HEADER_BYTES)


BAD: dict[str, bytes] = {
    "empty": b"",
    "text": b"step,layer\n",
    "deep": b"[" * 5000,
    "another format": header_with(format="moe-coord trace 2"),
    "no layers": header_with(layers=[], kind_of_layer=[]),
    "layers twice": header_with(layers=[1, 1]),
    "a layer of text": header_with(layers=["0", "1"]),
    "layers without a slab": header_with(kind_of_layer=[0]),
    "an unknown slab": header_with(kind_of_layer=[0, 1]),
    "a slab of nothing": header_with(slab_kinds=[[1, 0, 1]]),
    "a slab of two": header_with(slab_kinds=[[1, 1]]),
    "more active than there are": header_with(n_active=9),
    "not a number": header_with(n_experts=True),
    "unknown layer": header_with() + record(1, 2, 0, 1, 0, 0),
    "unknown expert": header_with() + record(1, 0, 8, 1, 0, 0),
    "unknown kind": header_with() + record(1, 0, 0, 1, 0, 3),
    "no tokens": header_with() + record(1, 0, 0, 0, 0, 0),
    "expert twice": header_with() + record(1, 0, 3, 1, 0, 0) * 2,
}


@pytest.mark.parametrize("case", BAD)
def test_nothing_else_is_read(tmp_path: Path, case: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(BAD[case])
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.startswith("TRACE: expected ")
    assert "\n" not in text


def test_places_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a readable file"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="--trace: expected a path that can be written"):
        create_trace(tmp_path, HEADER)
