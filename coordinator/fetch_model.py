"""Fetches a model from Hugging Face, then becomes ``moe-coord`` with the file's path.

A process of its own, reached by a clean exec: the libraries that fetch cost memory which is for
experts. They read their own settings (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, …) and show their own
progress. Bytes that came stay when the process ends, and the next one goes on behind them; a file
joins the cache only when its SHA-256 is the repository's.

The name and the cache folder (``-`` for the usual one) come before the arguments of ``moe-coord``.
"""

import fcntl
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.__main__ import reported
from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import format_size
from coordinator.command.terminal import Terminal
from coordinator.models.names import (
    HubName,
    advice,
    choose_files,
    find_cached,
    parse_name,
    with_path,
)
from coordinator.processes.limits import ResourceError

try:
    from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    HAS_HUB = True
except ImportError:  # an install without the extra
    HAS_HUB = False

HASHED_BYTES = 8 * 1024 * 1024  # at once
PARTIAL = ".moe-coord-partial"
EXTRA = "moe-coord[hf]"


def fetch(name: HubName, folder: Path | None, terminal: Terminal) -> Path:
    """The first file of the model, in the cache. Raises `ConfigError`, `ResourceError`."""
    if not HAS_HUB:
        raise ConfigError(
            f"{name}: expected it in the cache, or the package huggingface_hub to fetch it, found "
            f"neither; pip install '{EXTRA}'{advice(name, folder)}"
        )
    cache = folder or Path(constants.HF_HUB_CACHE)  # HF_HOME may have moved it
    cached = find_cached(name, cache)
    if cached is not None:
        return cached
    try:
        return _fetch(name, cache, terminal)
    except (ConfigError, ResourceError):
        raise
    except Exception as error:  # of several libraries, by the way it is reached
        why = (str(error).strip().splitlines() or [""])[0]
        raise ResourceError(
            f"{name}: expected to fetch it, found {type(error).__name__}: {why:.300}; try again, "
            "what came already is kept"
        ) from error


def _fetch(name: HubName, cache: Path, terminal: Terminal) -> Path:
    repository = f"{name.owner}/{name.repository}"
    info = HfApi().model_info(repository, revision=name.revision, files_metadata=True)
    entries = {item.rfilename: item for item in info.siblings or []}
    chosen = choose_files(entries, name)
    n_bytes = sum(entries[file].size or 0 for file in chosen)
    terminal.line(f"fetching {', '.join(chosen)} ({format_size(n_bytes)}) from {repository}")
    blobs = cache / f"models--{name.owner}--{name.repository}" / "blobs"
    paths = []
    for file in chosen:
        lfs = entries[file].lfs
        if lfs is not None and lfs.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            _fetch_blob(hf_hub_url(repository, file, revision=name.revision), lfs, blobs, terminal)
        # names the blob in the cache; larger files come through it whole
        paths.append(hf_hub_download(repository, file, revision=name.revision, cache_dir=cache))
    return Path(paths[0])


def _fetch_blob(url: str, lfs: Any, blobs: Path, terminal: Terminal) -> None:
    """Bring one file's bytes to the place where the library looks for them."""
    blob, partial = blobs / lfs.sha256, blobs / f"{lfs.sha256}{PARTIAL}"
    if blob.exists():
        return
    blobs.mkdir(parents=True, exist_ok=True)
    with partial.open("ab") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResourceError(
                f"{partial}: expected nobody else to fetch it, found another process; wait for it"
            ) from error
        done = out.tell()
        if done < lfs.size:
            headers = build_hf_headers()
            http_get(url, out, resume_size=done, headers=headers, expected_size=lfs.size)
    digest = sha256_of(partial, terminal)
    if digest != lfs.sha256:
        partial.unlink()
        raise ResourceError(
            f"{url}: expected SHA-256 {lfs.sha256}, found {digest}; what came was removed: try "
            "again"
        )
    partial.rename(blob)


def sha256_of(path: Path, terminal: Terminal) -> str:
    """The digest of a file, in hexadecimal."""
    digest, done, n_bytes = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while data := file.read(HASHED_BYTES):
            digest.update(data)
            done += len(data)
            terminal.progress("checking", done, n_bytes)
    terminal.end_progress()
    return digest.hexdigest()


def main(arguments: Sequence[str]) -> int:
    """Fetch, then become the command; returns only if that failed."""
    text, folder, *typed = arguments
    name = parse_name(text)
    assert isinstance(name, HubName)

    def job() -> int:
        with Terminal() as terminal:
            path = fetch(name, None if folder == "-" else Path(folder), terminal)
        command = [sys.executable, "-P", "-m", "coordinator", *with_path(typed, text, path)]
        os.execv(sys.executable, command)

    return reported(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
