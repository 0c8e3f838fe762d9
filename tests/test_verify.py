"""`moe-coord verify`: the first damaged slab is named, for packed and plain files."""

import json
from pathlib import Path

import pytest
from arms import pack, run_json, run_program
from gguf_builder import tiny_model

from compute_worker.arch import resolve
from io_worker.model_file import open_model


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain model, the packed one, and checksums of the plain one as JSON."""
    folder = tmp_path_factory.mktemp("model")
    plain = tiny_model(folder / "plain.gguf", n_layers=3, quantisation="Q4_K_M", n_active=3)
    manifest = folder / "sums.json"
    done = run_program("verify", str(plain), "--write-manifest", str(manifest))
    assert done.returncode == 0, done.stderr
    return {"plain": plain, "packed": pack(plain, folder / "packed.gguf"), "manifest": manifest}


ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "packed, its own": ("packed", ()),
    "packed, from JSON": ("packed", ("--manifest", "manifest")),
    "plain, from the packed": ("plain", ("--manifest", "packed")),
    "plain, from JSON": ("plain", ("--manifest", "manifest")),
}


def verified(both: dict[str, Path], name: str, path: Path | None = None) -> tuple[int, str]:
    which, flags = ARMS[name]
    arguments = [str(both.get(flag, flag)) for flag in flags]
    done = run_program("verify", str(path or both[which]), *arguments)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ARMS)
def test_a_whole_file_is_good(both: dict[str, Path], name: str) -> None:
    code, text = verified(both, name)
    assert code == 0, text
    assert "are as they were" in text


@pytest.mark.parametrize("name", ARMS)
def test_the_first_damaged_slab_is_named(both: dict[str, Path], tmp_path: Path, name: str) -> None:
    source = both[ARMS[name][0]]
    slabs = resolve(open_model(source)).slabs
    damaged = tmp_path / source.name
    data = bytearray(source.read_bytes())
    for layer, expert in ((2, 1), (1, 5)):  # the later one too
        down = slabs.layers[layer].ranges(expert)[2]
        data[down.offset + down.n_bytes - 1] ^= 0x10
    damaged.write_bytes(data)
    code, text = verified(both, name, damaged)
    assert (code, text.count("\n")) == (3, 1), text
    start = slabs.layers[1].ranges(5)[0].offset
    assert f"{damaged}: layer 1 expert 5: expected checksum" in text
    assert f"(byte {start})" in text


def test_a_damaged_dense_tensor_is_named(both: dict[str, Path], tmp_path: Path) -> None:
    tensor = open_model(both["packed"]).tensors["blk.1.attn_q.weight"]
    damaged = tmp_path / "p.gguf"
    data = bytearray(both["packed"].read_bytes())
    data[tensor.offset] ^= 1
    damaged.write_bytes(data)
    code, text = verified(both, "packed, its own", damaged)
    assert (code, text.count("\n")) == (3, 1), text
    assert "blk.1.attn_q.weight: expected checksum" in text


def test_bytes_between_the_tensors_do_not_matter(tmp_path: Path) -> None:
    """Padding is nobody's: no result depends on it."""
    plain = tiny_model(tmp_path / "m.gguf")
    packed = pack(plain, tmp_path / "p.gguf")
    (found,) = resolve(open_model(packed)).slabs.layers[0].reads(0)
    with packed.open("r+b") as file:
        file.seek(found.offset + found.n_bytes)
        file.write(b"x")
    assert run_program("verify", str(packed)).returncode == 0


REFUSED = {
    "plain without": ((), 2, "--manifest: expected one"),
    "of another model": (("--manifest", "other"), 3, "another model or version"),
    "a plain model": (("--manifest", "plain"), 3, "found a plain model"),
    "no JSON": (("--manifest", "text"), 3, "manifest: expected checksums"),
    "another format": (("--manifest", "format"), 3, "found another format"),
    "no list": (("--manifest", "list"), 3, "found another list"),
    "too few": (("--manifest", "few"), 3, "another model or version"),
    "missing": (("--manifest", "nothing"), 3, "No such file"),
    "written over": (("--write-manifest", "text"), 2, "cannot be written"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_manifest(both: dict[str, Path], tmp_path: Path, name: str) -> None:
    flags, code, text = REFUSED[name]
    content = json.loads(both["manifest"].read_text())
    other = pack(tiny_model(tmp_path / "o.gguf", n_layers=2), tmp_path / "other.gguf")
    paths = {"other": other, "plain": both["plain"]}
    texts = {
        "text": "no JSON",
        "format": json.dumps(content | {"format": "2"}),
        "list": json.dumps(content | {"checksums": [1.5]}),
        "few": json.dumps(content | {"checksums": content["checksums"][:-1]}),
    }
    for key, written in texts.items():
        paths[key] = tmp_path / key
        paths[key].write_text(written)
    arguments = [str(paths.get(flag, flag)) for flag in flags]
    done = run_program("verify", str(both["plain"]), *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert text in done.stderr


def test_counts_of_a_plain_model_fit_the_packed_one(both: dict[str, Path], tmp_path: Path) -> None:
    usage = tmp_path / "usage.json"
    flags = ("--tokens", "5,9,301,44", "-n", "4", "--usage", str(usage))
    first = run_json("--model", str(both["plain"]), *flags)
    second = run_json("--model", str(both["packed"]), *flags)
    assert second["tokens"] == first["tokens"]
    assert second["experts"]["requests"] == first["experts"]["requests"]
