"""Models by name: in caches made up here, and from a hub on the loopback address."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from arms import PROGRAM
from fake_hub import COMMIT, Hub, hub_of

from coordinator.command.config import shipped_model
from coordinator.command.flag_values import ConfigError
from coordinator.models.names import (
    HubName,
    OllamaName,
    choose_files,
    find_cached,
    parse_name,
    with_path,
)

WAIT_SECONDS = 60.0
QUANTS = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-f16.gguf", "mmproj-Q4_K_M.gguf", "README.md"]
SPLIT = [
    "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf",
    "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf",
    "m-Q8_0.gguf",
]
DYNAMIC = ["m-Q4_K_XL.gguf", "m-UD-Q4_K_XL.gguf", "m-IQ2_XXS.gguf", "m.imatrix.gguf"]
ONE = ["only.gguf"]


def hub_name(which: str | None) -> HubName:
    return HubName("o", "r", which, "main")


# Names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model.gguf", None),
        ("./hf:o/r:Q4_K_M", None),
        ("hf:allenai/OLMoE-1B-7B-0924-GGUF:Q4_K_M",
         HubName("allenai", "OLMoE-1B-7B-0924-GGUF", "Q4_K_M", "main")),
        ("hf:o/r", HubName("o", "r", None, "main")),
        ("hf:o/r:deep/m-Q8_0.gguf@v1.0", HubName("o", "r", "deep/m-Q8_0.gguf", "v1.0")),
        ("ollama:olmoe", OllamaName("registry.ollama.ai", "library", "olmoe", "latest")),
        ("ollama:me/olmoe:7b", OllamaName("registry.ollama.ai", "me", "olmoe", "7b")),
        ("ollama:hf.co/o/r:Q4_K_M", OllamaName("hf.co", "o", "r", "Q4_K_M")),
    ],
)  # fmt: skip
def test_names(text: str, name: HubName | OllamaName | None) -> None:
    assert parse_name(text) == name
    if name is not None:
        assert parse_name(str(name)) == name


@pytest.mark.parametrize(
    "text", ["hf:o", "hf:o/", "hf:../r:Q", "hf:o/r:../../x", "hf:o/r:a b", "hf:", "hf:o/r@../x"]
)
def test_half_a_hub_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--model: expected a name such as hf:OWNER/REPO"):
        parse_name(text)


@pytest.mark.parametrize("text", ["ollama:", "ollama:a/b/c/d", "ollama:../x", "ollama:a:b:c"])
def test_half_an_ollama_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--model: expected a name such as ollama:NAME:TAG"):
        parse_name(text)


@pytest.mark.parametrize(
    ("files", "which", "chosen"),
    [
        (QUANTS, "Q4_K_M", ["m-Q4_K_M.gguf"]),
        (QUANTS, "q4_k_m", ["m-Q4_K_M.gguf"]),
        (QUANTS, "F16", ["m-f16.gguf"]),
        (QUANTS, None, ["m-Q4_K_M.gguf"]),
        (QUANTS, "m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        (SPLIT, "Q4_K_M", SPLIT[:2]),
        (SPLIT, SPLIT[1], SPLIT[:2]),
        (SPLIT, "Q8_0", ["m-Q8_0.gguf"]),
        (DYNAMIC, "UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        (DYNAMIC, "m-Q4_K_XL.gguf", ["m-Q4_K_XL.gguf"]),
        (ONE, None, ONE),
    ],
)
def test_what_is_chosen(files: list[str], which: str | None, chosen: list[str]) -> None:
    assert list(choose_files(files, hub_name(which))) == chosen


@pytest.mark.parametrize(
    ("files", "which", "error"),
    [
        (QUANTS, "Q5_K_M", "expected one model, found 0; the repository has Q4_K_M, Q8_0, f16"),
        (QUANTS, "4_K_M", "found 0"),
        (["README.md"], None, "found 0; the repository has no GGUF file"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "found 2; the repository has Q8_0, Q8_0"),
        (DYNAMIC, "Q4_K_XL", "found 2; the repository has Q4_K_XL, UD-Q4_K_XL"),
        (DYNAMIC, None, "found 0"),
        (SPLIT[:1], None, "expected 2 parts, found 1"),
    ],
)
def test_what_cannot_be_chosen(files: list[str], which: str | None, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        choose_files(files, hub_name(which))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["--model", "hf:o/r", "-n", "3"], ["--model", "/m", "-n", "3"]),
        (["--model=hf:o/r"], ["--model=/m"]),
        (["-mhf:o/r"], ["-m/m"]),
        (["map", "hf:o/r"], ["map", "/m"]),
        (["-n", "3"], ["-n", "3", "--model=/m"]),
    ],
)
def test_the_path_takes_the_place_of_the_name(typed: list[str], expected: list[str]) -> None:
    assert with_path(typed, "hf:o/r", Path("/m")) == expected


# Caches


def hub_cache(folder: Path, files: dict[str, bytes], *, revision: str = "main") -> Path:
    """A repository as Hugging Face's programs keep it."""
    place = folder / "models--o--r"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / revision).write_text(COMMIT)
    for name, data in files.items():
        blob = place / "blobs" / hashlib.sha256(data + name.encode()).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(data)
        link = place / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return place / "snapshots" / COMMIT


@pytest.mark.parametrize(
    ("files", "which", "found"),
    [
        (QUANTS, "Q8_0", "m-Q8_0.gguf"),
        (QUANTS, "Q5_K_M", None),
        (SPLIT, "Q4_K_M", SPLIT[0]),
        (SPLIT[:1], "Q4_K_M", None),  # the other part was not fetched
        (ONE, None, "only.gguf"),
    ],
)
def test_in_the_cache_of_hugging_face(
    tmp_path: Path, files: list[str], which: str | None, found: str | None
) -> None:
    snapshot = hub_cache(tmp_path, dict.fromkeys(files, b"x"))
    expected = snapshot / found if found is not None else None
    assert find_cached(hub_name(which), tmp_path) == expected
    assert find_cached(HubName("o", "other", which, "main"), tmp_path) is None


def test_a_link_without_bytes_is_not_there(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, {"m-Q8_0.gguf": b"x"})
    (snapshot / "m-Q8_0.gguf").resolve().unlink()
    assert find_cached(hub_name("Q8_0"), tmp_path) is None


def test_revisions(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, {"m-Q8_0.gguf": b"x"}, revision="v1")
    for revision in ("v1", COMMIT):
        found = find_cached(HubName("o", "r", "Q8_0", revision), tmp_path)
        assert found == snapshot / "m-Q8_0.gguf"
    assert find_cached(hub_name("Q8_0"), tmp_path) is None


def ollama_models(folder: Path, data: bytes, **changes: object) -> Path:
    """`me/olmoe:7b` as Ollama keeps it; returns the blob."""
    digest = hashlib.sha256(data).hexdigest()
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": len(data),
    }
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": "x", "size": 1}
    manifest = folder / "manifests" / "registry.ollama.ai" / "me" / "olmoe" / "7b"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [template, layer | changes]}))
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir()
    blob.write_bytes(data)
    return blob


OLMOE = OllamaName("registry.ollama.ai", "me", "olmoe", "7b")


def test_in_the_folder_of_ollama(tmp_path: Path) -> None:
    blob = ollama_models(tmp_path, b"weights")
    assert find_cached(OLMOE, tmp_path) == blob
    other = OllamaName("registry.ollama.ai", "me", "olmoe", "1b")
    assert find_cached(other, tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"digest": "sha256:../../../etc/passwd"}, "expected a SHA-256 digest, found 'sha256:../"),
        ({"digest": "sha256:" + "0" * 64}, "found none: No such file or directory; pull it again"),
        ({"size": 999}, "expected 999 bytes in .*, found 7; pull it again"),
        ({"size": "many"}, "expected the manifest of one model"),
        ({"mediaType": "other"}, "expected the manifest of one model"),
    ],
)
def test_a_manifest_that_is_wrong(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    ollama_models(tmp_path, b"weights", **changes)
    with pytest.raises(ConfigError, match=error):
        find_cached(OLMOE, tmp_path)


# Runs


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, **environment}, timeout=WAIT_SECONDS,
    )  # fmt: skip


ANSWER = ("-p", "In the", "-n", "4", "--json")


def test_a_run_by_each_name(tmp_path: Path) -> None:
    data = shipped_model().read_bytes()
    snapshot = hub_cache(tmp_path / ".cache" / "huggingface" / "hub", {"m-Q4_K_M.gguf": data})
    blob = ollama_models(tmp_path / ".ollama" / "models", data)
    expected = json.loads(run(*ANSWER).stdout)["tokens"]
    for name, path in (
        ("hf:o/r:Q4_K_M", snapshot / "m-Q4_K_M.gguf"),
        ("ollama:me/olmoe:7b", blob),
    ):
        for more in ((), ("--single-process",)):
            done = run("--model", name, *ANSWER, *more, HOME=str(tmp_path))
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            assert (found["tokens"], found["model"]) == (expected, str(path))
        assert run("map", name, "--json", HOME=str(tmp_path)).returncode == 0


def test_what_ollama_does_not_have(tmp_path: Path) -> None:
    ollama_models(tmp_path / ".ollama" / "models", b"x")
    done = run("--model", "ollama:me/olmoe:1b", *ANSWER, HOME=str(tmp_path))
    assert done.returncode == 2
    assert "`ollama pull me/olmoe:1b`" in done.stderr
    assert done.stderr.endswith("here are ollama:me/olmoe:7b\n")


# Fetching


@pytest.fixture
def hub() -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub", reason="needs the Python package huggingface_hub")
    with hub_of({"m-Q4_K_M.gguf": shipped_model().read_bytes(), "m-Q8_0.gguf": b"x"}) as made:
        yield made


def settings(hub: Hub, home: Path) -> dict[str, str]:
    patient = {"HF_HUB_DOWNLOAD_TIMEOUT": "60", "HF_HUB_ETAG_TIMEOUT": "60"}  # it asks again after
    return {"HF_ENDPOINT": hub.url, "HOME": str(home), "HF_HOME": str(home / "hf"), **patient}


NAME = "hf:owner/repo:Q4_K_M"


def test_a_model_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    done = run("--model", NAME, *ANSWER, **settings(hub, tmp_path))
    assert done.returncode == 0, done.stderr
    assert "fetching m-Q4_K_M.gguf (17.4 MiB) from owner/repo" in done.stderr
    assert json.loads(done.stdout)["model"].endswith(f"snapshots/{COMMIT}/m-Q4_K_M.gguf")
    assert hub.ranges == [None]
    hub.url = "http://127.0.0.1:1"  # nobody is there, and nobody is asked
    again = run("--model", NAME, *ANSWER, **settings(hub, tmp_path))
    assert json.loads(again.stdout)["tokens"] == json.loads(done.stdout)["tokens"]


def test_a_folder_can_be_chosen(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    flags = ("--model", NAME, "--model-cache", str(folder))
    assert run(*flags, *ANSWER, **settings(hub, tmp_path)).returncode == 0
    assert list(folder.rglob("m-Q4_K_M.gguf")) and not (tmp_path / "hf" / "hub").exists()


def test_what_was_begun_is_gone_on_with(hub: Hub, tmp_path: Path) -> None:
    hub.stall_after_bytes = 12 * 1024 * 1024
    environment = {**os.environ, **settings(hub, tmp_path)}
    first = subprocess.Popen(
        [*PROGRAM, "--model", NAME, *ANSWER], env=environment, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + WAIT_SECONDS
    n_bytes = 0
    while n_bytes < 8 * 1024 * 1024:  # written in large pieces: it stalls with ten MiB
        assert time.monotonic() < deadline
        time.sleep(0.1)
        n_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*partial"))
    other = run("--model", NAME, *ANSWER, **settings(hub, tmp_path))
    assert other.returncode == 4 and "found another process" in other.stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=WAIT_SECONDS)
    assert first.returncode == 130

    done = run("--model", NAME, *ANSWER, **settings(hub, tmp_path))
    assert done.returncode == 0, done.stderr
    resumed = re.fullmatch(r"bytes=(\d+)-", hub.ranges[-1] or "")
    assert resumed is not None and int(resumed[1]) >= n_bytes
    assert len(hub.ranges) == 2
    assert not list(tmp_path.rglob("*partial"))


def test_wrong_bytes_do_not_join_the_cache(hub: Hub, tmp_path: Path) -> None:
    hub.wrong_sha = True
    done = run("--model", NAME, *ANSWER, **settings(hub, tmp_path))
    assert done.returncode == 4
    assert "expected SHA-256 " in done.stderr and done.stderr.endswith(": try again\n")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 9]


@pytest.mark.parametrize(
    ("name", "code", "error"),
    [
        ("hf:owner/repo:Q5_K_M", 2, "hf:owner/repo:Q5_K_M: expected one model, found 0; the"),
        ("hf:owner/other:Q4_K_M", 4, "expected to fetch it, found "),
    ],
)
def test_what_the_hub_does_not_have(
    hub: Hub, tmp_path: Path, name: str, code: int, error: str
) -> None:
    done = run("--model", name, *ANSWER, **settings(hub, tmp_path))
    assert (done.returncode, error in done.stderr) == (code, True), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_the_library(tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError")
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); "
        "from coordinator.fetch_model import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), NAME, str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.endswith("found neither; pip install 'moe-coord[hf]'\n")
