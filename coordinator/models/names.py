"""Models by name: what the programs of Hugging Face and Ollama have on this machine already.

    hf:OWNER/REPO:WHICH[@REVISION]   WHICH: a type of weights such as Q4_K_M, or the file's name
    ollama:[HOST/][OWNER/]NAME[:TAG]

Only looks at folders, and fetches nothing (see `fetch_model`). Folders and files are named as those
programs name them:

    hub/models--OWNER--REPO/refs/main                   names the commit
    hub/models--OWNER--REPO/snapshots/COMMIT/FILE.gguf  a link to the bytes
    models/manifests/HOST/OWNER/NAME/TAG                JSON; its layer of the model names the blob
    models/blobs/sha256-DIGEST                          the bytes
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.command.flag_values import ConfigError

HUB, OLLAMA = "hf:", "ollama:"
PREFERRED = "Q4_K_M"  # where no type was named
OLLAMA_HOST, OLLAMA_OWNER, OLLAMA_TAG = "registry.ollama.ai", "library", "latest"
MODEL_LAYER = "application/vnd.ollama.image.model"
MAX_MANIFEST_BYTES = 1024 * 1024
_PART = r"[A-Za-z0-9][\w.-]{0,127}"
_HUB = re.compile(
    rf"hf:({_PART})/({_PART})(?::([\w./-]{{1,200}}))?(?:@([\w./-]{{1,200}}))?", re.ASCII
)
_OLLAMA = re.compile(rf"ollama:(?:(?:({_PART})/)?({_PART})/)?({_PART})(?::({_PART}))?", re.ASCII)
_PIECE = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_NO_MODEL = re.compile(r"(^|[-._/])(mmproj|imatrix)", re.IGNORECASE)
_TYPE = re.compile(
    r"[-._]((?:UD-)?(?:I?Q\d\w*|MXFP4\w*|BF16|F16|F32))(?:-\d{5}-of-\d{5})?\.gguf$", re.I
)


@dataclass(frozen=True, slots=True)
class HubName:
    """A file of a repository. `which` None: the one it has, or that of the preferred type."""

    owner: str
    repository: str
    which: str | None
    revision: str

    def __str__(self) -> str:
        which = f":{self.which}" if self.which else ""
        revision = f"@{self.revision}" if self.revision != "main" else ""
        return f"{HUB}{self.owner}/{self.repository}{which}{revision}"


@dataclass(frozen=True, slots=True)
class OllamaName:
    """A model of a registry."""

    host: str
    owner: str
    name: str
    tag: str

    def __str__(self) -> str:
        return f"{OLLAMA}{self.shown}"

    @property
    def shown(self) -> str:
        """As Ollama lists it."""
        host = f"{self.host}/" if self.host != OLLAMA_HOST else ""
        owner = f"{self.owner}/" if host or self.owner != OLLAMA_OWNER else ""
        return f"{host}{owner}{self.name}:{self.tag}"


ModelName = HubName | OllamaName


def parse_name(text: str) -> ModelName | None:
    """The model that a text names; None for a path. Raises `ConfigError` for half a name."""
    if text.startswith(HUB):
        match = _HUB.fullmatch(text)
        if match is None or ".." in text:
            raise _not_a_name(text, "hf:OWNER/REPO:Q4_K_M")
        owner, repository, which, revision = match.groups()
        return HubName(owner, repository, which, revision or "main")
    if text.startswith(OLLAMA):
        match = _OLLAMA.fullmatch(text)
        if match is None or ".." in text:
            raise _not_a_name(text, "ollama:NAME:TAG")
        host, owner, name, tag = match.groups()
        return OllamaName(host or OLLAMA_HOST, owner or OLLAMA_OWNER, name, tag or OLLAMA_TAG)
    return None


def _not_a_name(text: str, example: str) -> ConfigError:
    return ConfigError(f"--model: expected a name such as {example}, found {text!a:.100}")


# Choosing among the files of a repository


def choose_files(files: Iterable[str], name: HubName) -> tuple[str, ...]:
    """The parts of the one model that is meant, in order; raises `ConfigError` if it is not one."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf") and not _NO_MODEL.search(file):
            models.setdefault(_PIECE.sub(".gguf", file), []).append(file)
    found = {model: parts for model, parts in models.items() if _is_meant(model, name.which)}
    if name.which is None and len(found) > 1:
        found = {model: parts for model, parts in found.items() if _is_meant(model, PREFERRED)}
    if len(found) != 1:
        known = found or models
        raise ConfigError(
            f"{name}: expected one model, found {len(found)}; the repository has "
            f"{', '.join(map(_shown, sorted(known)[:12])) or 'no GGUF file'}"
        )
    parts = next(iter(found.values()))
    total = _PIECE.search(parts[0])
    if total is not None and len(parts) != int(total[1]):
        raise ConfigError(f"{name}: expected {int(total[1])} parts, found {len(parts)}")
    return tuple(parts)


def _is_meant(model: str, which: str | None) -> bool:
    if which is None or which == model or which == model.rpartition("/")[2]:
        return True
    if _PIECE.sub(".gguf", which) == model:  # one of its parts
        return True
    return re.search(rf"(^|[-._/]){re.escape(which)}\.gguf$", model, re.IGNORECASE) is not None


def _shown(model: str) -> str:
    kind = _TYPE.search(model)
    return kind[1] if kind is not None else model


# Looking


def find_cached(name: ModelName, folder: Path | None) -> Path | None:
    """The (first) file of a model that is here; None if it is not.

    `folder` takes the place of the programs' own. Raises `ConfigError` for a name that fits none or
    several, or a file that is not whole.
    """
    if isinstance(name, HubName):
        return _in_hub(name, folder or hub_folder())
    for place in [folder] if folder is not None else ollama_folders():
        if (found := _in_ollama(name, place)) is not None:
            return found
    return None


def hub_folder() -> Path:
    """Where Hugging Face's programs keep what they fetched."""
    return Path.home() / ".cache" / "huggingface" / "hub"


def ollama_folders() -> list[Path]:
    """Where Ollama keeps models: the user's, and those of its service."""
    services = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models")
    return [Path.home() / ".ollama" / "models", *map(Path, services)]


def _in_hub(name: HubName, hub: Path) -> Path | None:
    place = hub / f"models--{name.owner}--{name.repository}"
    commit = _read(place / "refs" / name.revision)
    snapshot = place / "snapshots" / (commit.strip() if commit is not None else name.revision)
    if ".." in snapshot.name or not snapshot.is_dir():
        return None
    files = [
        path.relative_to(snapshot).as_posix()
        for path in snapshot.rglob("*.gguf")
        if path.is_file()  # a link whose bytes were removed is none
    ]
    try:
        return snapshot / choose_files(files, name)[0]
    except ConfigError:
        if name.which is not None:  # the cache has others of its models, or a part of this one
            return None
        raise


def _in_ollama(name: OllamaName, models: Path) -> Path | None:
    manifest = models / "manifests" / name.host / name.owner / name.name / name.tag
    text = _read(manifest)
    if text is None:
        return None
    try:
        layers = [item for item in json.loads(text)["layers"] if item["mediaType"] == MODEL_LAYER]
        (layer,) = layers
        digest, n_bytes = str(layer["digest"]), int(layer["size"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{manifest}: expected the manifest of one model; pull it again"
        ) from None
    if re.fullmatch(r"sha256:[0-9a-f]{64}", digest) is None:
        raise ConfigError(f"{manifest}: expected a SHA-256 digest, found {digest!a:.80}")
    blob = models / "blobs" / digest.replace(":", "-")
    try:
        found = blob.stat().st_size
    except OSError as error:
        raise ConfigError(
            f"{name}: expected {blob}, found none: {error.strerror}; pull it again"
        ) from error
    if found != n_bytes:
        raise ConfigError(
            f"{name}: expected {n_bytes} bytes in {blob}, found {found}; pull it again"
        )
    return blob


def _read(path: Path) -> str | None:
    """A small file; None if there is none that can be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_MANIFEST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def advice(name: ModelName, folder: Path | None) -> str:
    """Models of the same program that are here, as the end of an error; empty if there are none."""
    if isinstance(name, HubName):
        found = _listed(_hub_names, [folder or hub_folder()])
    else:
        found = _listed(_ollama_names, [folder] if folder is not None else ollama_folders())
    return f"; here are {', '.join(found[:8])}" if found else ""


def _listed(names: Callable[[Path], Sequence[str]], places: Iterable[Path]) -> list[str]:
    found: list[str] = []
    for place in places:
        try:
            found += names(place)
        except OSError:  # not ours to read: nothing to advise
            continue
    return sorted(found)


def _hub_names(hub: Path) -> list[str]:
    found = []
    for place in hub.glob("models--*--*"):
        _, owner, repository = place.name.split("--", 2)
        for path in place.glob("snapshots/*/**/*.gguf"):
            if not _NO_MODEL.search(path.name):
                found.append(f"{HUB}{owner}/{repository}:{_shown(path.name)}")
    return list(dict.fromkeys(found))


def _ollama_names(models: Path) -> list[str]:
    root = models / "manifests"
    paths = [path for path in root.glob("*/*/*/*") if path.is_file()]
    return [str(OllamaName(*path.relative_to(root).parts)) for path in paths]


def with_path(arguments: Sequence[str], name: str, path: Path) -> list[str]:
    """Arguments of the command line with the path where the name stood."""
    for flag in ("", "--model=", "-m=", "-m"):
        if f"{flag}{name}" in arguments:
            place = list(arguments).index(f"{flag}{name}")
            return [*arguments[:place], f"{flag}{path}", *arguments[place + 1 :]]
    return [*arguments, f"--model={path}"]  # the last one counts
