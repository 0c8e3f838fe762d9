"""Models in one file and in sets: what opens, and what is refused with which part named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_builder import tiny_model
from gguf_bytes import F32, I32, STRING, U16, U64, entry, gguf, tensor_entry

from io_worker.gguf_header import ModelFormatError
from io_worker.model_file import open_model


def part(
    number: object = 0,
    count: object = 2,
    n_tensors: object = 2,
    *,
    tensor: str = "t",
    kinds: tuple[int, int, int] = (U16, U16, I32),
) -> bytes:
    """One part of a set that holds one tensor; None leaves a key out."""
    names = ("split.no", "split.count", "split.tensors.count")
    keys = zip(names, (number, count, n_tensors), kinds, strict=True)
    entries = [entry(key, kind, value) for (key, value, kind) in keys if value is not None]
    return gguf(entries, [tensor_entry(tensor, (8,))], bytes(32))


def write_set(folder: Path, *parts: bytes) -> Path:
    """Write the parts as `m-00001-of-0000N.gguf` and on; returns the first."""
    for index, content in enumerate(parts):
        (folder / f"m-{index + 1:05}-of-{len(parts):05}.gguf").write_bytes(content)
    return folder / f"m-00001-of-{len(parts):05}.gguf"


def refusal(path: Path) -> ModelFormatError:
    with pytest.raises(ModelFormatError) as caught:
        open_model(path)
    assert str(caught.value).isprintable()
    return caught.value


def test_opens_a_single_file(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "one.gguf", n_layers=2)
    model = open_model(path)
    assert model.paths == (str(path),)
    assert model.file_bytes == (path.stat().st_size,)
    assert model.metadata["olmoe.block_count"] == 2
    assert {tensor.file for tensor in model.tensors.values()} == {0}
    assert open_model(str(path)) == model


@pytest.mark.parametrize("given", [1, 2, 3])
def test_opens_a_set_by_any_of_its_parts(tmp_path: Path, given: int) -> None:
    single = open_model(tiny_model(tmp_path / "m.gguf"))
    first = tiny_model(tmp_path / "m.gguf", split=3)
    model = open_model(first.with_name(f"m-{given:05}-of-00003.gguf"))
    assert [Path(path).name for path in model.paths] == [
        f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)
    ]
    assert model.file_bytes == tuple([Path(path).stat().st_size for path in model.paths])
    assert model.metadata.items() >= single.metadata.items()
    assert model.tensors.keys() == single.tensors.keys()
    for name, tensor in model.tensors.items():
        alone = single.tensors[name]
        assert (tensor.shape, tensor.type) == (alone.shape, alone.type)
        with (
            Path(model.paths[tensor.file]).open("rb") as file,
            Path(single.paths[0]).open("rb") as one,
        ):
            file.seek(tensor.offset)
            one.seek(alone.offset)
            assert file.read(tensor.n_bytes) == one.read(alone.n_bytes)


def test_opens_a_set_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path, part(0), part(1, tensor="u"))
    monkeypatch.chdir(tmp_path)
    assert open_model("m-00002-of-00002.gguf").paths == (
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
    )


def test_a_part_may_be_empty_and_a_symbolic_link(tmp_path: Path) -> None:
    """Splitters can write a first part with metadata only; caches keep links to blobs."""
    keys = [entry("split.no", U16, 0), entry("split.count", U16, 2)]
    first = write_set(tmp_path, gguf([*keys, entry("split.tensors.count", I32, 1)]), part(1, 2, 1))
    blob = first.rename(tmp_path / "blob")
    first.symlink_to(blob)
    assert [tensor.file for tensor in open_model(first).tensors.values()] == [1]


@pytest.mark.parametrize(
    "content",
    [part(0, 1, 1), part(None, None, None), part(0, 1, None)],
    ids=["one", "no-keys", "bare"],
)
@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00001.gguf", "-00001-of-00001.gguf", "m"])
def test_a_set_of_one_is_a_single_file(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert open_model(path).paths == (str(path),)


BAD_SETS: dict[str, tuple[tuple[bytes, ...], str, str]] = {
    # the parts, the part that is named, what is said of it
    "count-0": ((part(0, 0), part(1)), "00001", "split.count: expected 1 to 999, found 0"),
    "count-1": (
        (part(0, 1), part(1)),
        "00001",
        "split.count: expected 2 as in the file name, found 1",
    ),
    "count-65535": ((part(0, 65_535), part(1)), "00001", "split.count: expected 1 to 999"),
    "count-2-to-the-64": (
        (part(0, 2**64 - 1, kinds=(U16, U64, I32)), part(1)),
        "00001",
        "split.count: expected 1 to 999",
    ),
    "count-missing": (
        (part(0, None), part(1)),
        "00001",
        "split.count: expected 2 as in the file name",
    ),
    "count-missing-in-second": ((part(0), part(1, None, tensor="u")), "00002", "found no such key"),
    "count-a-text": ((part(0, "2", kinds=(U16, STRING, I32)), part(1)), "00001", "found str"),
    "count-a-float": ((part(0, 2.0, kinds=(U16, F32, I32)), part(1)), "00001", "found float"),
    "number-1-in-first": ((part(1), part(1)), "00001", "split.no: expected 0, being part 1 of 2"),
    "number-0-twice": ((part(0), part(0, tensor="u")), "00002", "split.no: expected 1"),
    "number-over-count": ((part(0), part(7, tensor="u")), "00002", "split.no: expected 1"),
    "number-missing": ((part(0), part(None, tensor="u")), "00002", "found no such key"),
    "number-negative": (
        (part(0), part(-1, kinds=(I32, U16, I32), tensor="u")),
        "00002",
        "found -1",
    ),
    "swapped": ((part(1), part(0, tensor="u")), "00001", "split.no: expected 0"),
    "tensors-one-more": (
        (part(0, n_tensors=3), part(1, n_tensors=3, tensor="u")),
        "00001",
        "split.tensors.count: expected 2, the tensors of all parts, found 3",
    ),
    "tensors-unlike-in-second": (
        (part(0), part(1, n_tensors=9, tensor="u")),
        "00002",
        "found 9; a part belongs to another set",
    ),
    "tensors-missing": (
        (part(0, n_tensors=None), part(1, tensor="u")),
        "00001",
        "found no such key",
    ),
    "tensor-in-both": ((part(0), part(1)), "00002", "t: expected each tensor in one part"),
    "second-empty": ((part(0), b""), "00002", "magic: expected 4 bytes"),
    "second-short": ((part(0), part(1, tensor="u")[:-1]), "00002", "u: expected data up to byte"),
    "second-of-another-kind": ((part(0), b"GGML" + bytes(60)), "00002", "magic: expected GGUF"),
}


@pytest.mark.parametrize("case", BAD_SETS)
def test_refuses_a_bad_set_naming_the_part(tmp_path: Path, case: str) -> None:
    parts, named, fragment = BAD_SETS[case]
    error = refusal(write_set(tmp_path, *parts))
    assert Path(error.path).name == f"m-{named}-of-00002.gguf"
    assert fragment in str(error)


BAD_NAMES: dict[str, tuple[str, str]] = {
    "number-0": ("m-00000-of-00002.gguf", "expected part 1 to N of at most 999, found 0 of 2"),
    "number-over-count": ("m-00003-of-00002.gguf", "found 3 of 2"),
    "count-0": ("m-00001-of-00000.gguf", "found 1 of 0"),
    "count-1000": ("m-00001-of-01000.gguf", "found 1 of 1000"),
    "count-99999": ("m-99999-of-99999.gguf", "found 99999 of 99999"),
}


@pytest.mark.parametrize("case", BAD_NAMES)
def test_refuses_names_that_are_no_part_of_a_set(tmp_path: Path, case: str) -> None:
    name, fragment = BAD_NAMES[case]
    (tmp_path / name).write_bytes(part())
    assert fragment in str(refusal(tmp_path / name))


@pytest.mark.parametrize("name", ["renamed.gguf", "m-1-of-2.gguf", "m-00001-of-00002.gguf.part"])
def test_a_renamed_part_is_told_how_parts_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(part())
    assert "the parts must keep their names NAME-00001-of-0000N.gguf" in str(
        refusal(tmp_path / name)
    )


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_first(path: Path) -> None:
    shutil.copy(path.with_name("m-00001-of-00003.gguf"), path)


def as_third(path: Path) -> None:
    shutil.copy(path.with_name("m-00003-of-00003.gguf"), path)


@pytest.mark.parametrize(
    ("damage", "fragment"),
    [
        (remove, "expected all 3 parts in one folder, missing 1: m-00002-of-00003.gguf"),
        (truncate, "it is truncated or damaged, fetch it again"),
        (as_directory, "found a directory"),
        (as_first, "split.no: expected 1, being part 2 of 3 by its name, found 0"),
        (as_third, "split.no: expected 1, being part 2 of 3 by its name, found 2"),
    ],
)
def test_names_the_damaged_part_of_a_model(
    tmp_path: Path, damage: Callable[[Path], None], fragment: str
) -> None:
    first = tiny_model(tmp_path / "m.gguf", split=3)
    damage(tmp_path / "m-00002-of-00003.gguf")
    line = str(refusal(first))
    assert "m-00002-of-00003.gguf" in line and fragment in line


def test_names_at_most_five_missing_parts(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00999.gguf"
    path.write_bytes(part(0, 999))
    line = str(refusal(path))
    assert "missing 998: m-00002-of-00999.gguf, " in line and line.endswith(
        "m-00006-of-00999.gguf, …"
    )


def test_a_set_that_is_not_there_is_a_missing_file(tmp_path: Path) -> None:
    error = refusal(tmp_path / "gone-00002-of-00003.gguf")
    assert "gone-00001-of-00003.gguf: file: expected a GGUF file, found: No such file" in str(error)


def test_names_of_parts_never_come_from_the_file(tmp_path: Path) -> None:
    keys = [
        entry("split.no", U16, 0),
        entry("split.count", U16, 1),
        entry("split.tensors.count", I32, 0),
    ]
    names = [entry(key, STRING, "../../etc/passwd") for key in ("split.name", "general.name")]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([*keys, *names]))
    assert open_model(path).paths == (str(path),)


def test_the_fingerprint_tells_models_apart_and_ignores_the_place(tmp_path: Path) -> None:
    first = tiny_model(tmp_path / "a.gguf")
    copy = Path(shutil.copy(first, tmp_path / "b.gguf"))
    assert open_model(copy).fingerprint == open_model(first).fingerprint
    longer = Path(shutil.copy(first, tmp_path / "c.gguf"))
    longer.write_bytes(first.read_bytes() + bytes(32))
    others = [
        longer,
        tiny_model(tmp_path / "d.gguf", n_active=3),
        tiny_model(tmp_path / "e.gguf", quantisation="Q4_0"),
        tiny_model(tmp_path / "f.gguf", split=2),
        tiny_model(tmp_path / "g.gguf", version=2),
    ]
    fingerprints = {open_model(path).fingerprint for path in [first, *others]}
    assert len(fingerprints) == 6
    assert {len(text) for text in fingerprints} == {32}


def test_arrays_are_dropped_and_the_rest_stays(tmp_path: Path) -> None:
    model = open_model(tiny_model(tmp_path / "tiny.gguf"))
    arrays = {key for key, value in model.metadata.items() if isinstance(value, list)}
    assert "tokenizer.ggml.tokens" in arrays
    others = {key: value for key, value in model.metadata.items() if key not in arrays}
    model.drop_arrays()
    assert model.metadata == others != {}
