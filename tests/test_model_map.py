import io
import json
from pathlib import Path

import pytest
from gguf_builder import tiny_model

from compute_worker.arch import resolve
from coordinator.command.commands import MapCommand
from coordinator.command.config import shipped_model
from coordinator.models.map import model_map, show_map
from io_worker.gguf_header import ModelFormatError
from io_worker.model_file import open_model


def printed(command: MapCommand, encoding: str = "utf-8") -> str:
    data = io.BytesIO()
    output = io.TextIOWrapper(data, encoding=encoding)
    show_map(command, output)
    output.flush()
    return data.getvalue().decode(encoding)


@pytest.mark.parametrize("options", [{}, {"arch": "qwen3moe", "tied": True}, {"split": 3}])
def test_the_parts_are_all_tensors_of_the_file(tmp_path: Path, options: dict[str, object]) -> None:
    path = tiny_model(tmp_path / "m.gguf", quantisation="Q4_K_M", **options)
    model = open_model(path)
    parts = model_map(str(path), sum(model.file_bytes), resolve(model))
    assert parts.dense_bytes + parts.experts_bytes == sum(t.n_bytes for t in model.tensors.values())
    assert parts.experts_bytes == sum(
        t.n_bytes for name, t in model.tensors.items() if "_exps." in name
    )
    layers = sum(layer.dense_bytes for layer in parts.layers)
    rest = parts.embedding_bytes + parts.output_bytes
    final_norm = model.tensors["output_norm.weight"].n_bytes
    assert parts.dense_bytes == layers + rest + final_norm
    assert parts.active_experts_bytes == parts.experts_bytes * parts.n_active // parts.n_experts


def test_all_by_active_does_not_count_a_table_that_is_only_looked_up(tmp_path: Path) -> None:
    for tied in (False, True):
        path = tiny_model(tmp_path / f"{tied}.gguf", arch="qwen3moe", tied=tied)
        model = open_model(path)
        parts = model_map("m", sum(model.file_bytes), resolve(model))
        used = parts.dense_bytes + parts.active_experts_bytes
        used -= 0 if tied else parts.embedding_bytes
        assert parts.all_by_active == (parts.dense_bytes + parts.experts_bytes) / used


def test_json_of_the_shipped_model() -> None:
    found = json.loads(printed(MapCommand(json=True)))
    assert found["model"] == str(shipped_model())
    assert (found["n_layers"], found["n_experts"], found["n_active"]) == (8, 16, 2)
    assert len(found["layers"]) == 8
    assert found["layers"][0]["types"] == ["Q4_K", "Q4_K", "Q6_K"]
    assert found["active_experts_bytes"] == sum(2 * x["slab_bytes"] for x in found["layers"])
    assert found["dense_bytes"] + found["experts_bytes"] <= found["file_bytes"]
    assert found["pages_per_expert"] < found["pages_touched_per_expert"]
    assert found["pages_touched_per_expert"] < found["pages_per_expert"] + 2 * 3
    assert found["smallest_pool_bytes"] < found["whole_pool_bytes"]


def test_bars_are_in_proportion_and_plain_where_there_is_no_terminal() -> None:
    text = printed(MapCommand())
    assert "\x1b" not in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert lines["experts"].count("█") > lines["dense"].count("█") > lines["embedding"].count("█")
    assert lines["norms"].count("█") == 1
    assert lines["0"].count("█") == 40
    assert "16 x 124 KiB, Q4_K Q4_K Q6_K" in lines["0"]
    assert "token cycle: 1.82 MiB" in text
    assert "pages per expert: touched 32.1, filled 29.1: " in text
    assert "█" not in printed(MapCommand(), "ascii")
    assert "####" in printed(MapCommand(), "ascii")


def test_a_file_name_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "a\x1b[31m [bold]b.gguf")
    first = printed(MapCommand(path)).splitlines()[0]
    assert first.startswith(r"a\x1b[31m [bold]b.gguf: olmoe, 2 layers")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError):
        show_map(MapCommand(tmp_path / "none.gguf"), io.StringIO())


def test_a_closed_standard_output_is_no_fault() -> None:
    show_map(MapCommand(), None)
