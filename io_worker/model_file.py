"""A model as its file or set of files: all tensors in one table, with the file each lies in.

A set is `NAME-00001-of-0000N.gguf` to `NAME-0000N-of-0000N.gguf`; only the first part carries the
model's metadata. Names of parts are built from the name that was given, never from what a file
says. Any part may be given, the set is always opened from its first. A packed file
(`packed_layout`) is a model of one file.

This module does not know what a key (except `split.…`) or a tensor means.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from io_worker.gguf_header import GgufHeader, ModelFormatError, TensorInfo, read_header
from io_worker.packed_layout import is_packed, read_packed

MAX_PARTS = 999
_SHOWN_PARTS = 5  # of the missing ones, in a message
_PART_NAME = re.compile(
    r"(?P<name>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Model:
    """An opened model: `paths` and `file_bytes` by file index, `metadata` of the first file."""

    paths: tuple[str, ...]
    file_bytes: tuple[int, ...]
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]
    fingerprint: str  # 32 hex digits over headers and sizes; not over the weights. A packed file
    # has that of the file that it was made of
    is_packed: bool = False  # slabs are whole; a joined tensor's experts lie a slab apart
    checksums: tuple[int, ...] = ()  # of a packed file

    def drop_arrays(self) -> None:
        """Forget the metadata that are lists. Those of a vocabulary take tens of MiB, and nobody
        needs them once there is a tokenizer."""
        for key in [key for key, value in self.metadata.items() if isinstance(value, list)]:
            del self.metadata[key]


def open_model(path: str | os.PathLike[str]) -> Model:
    """Read the header of the model at `path` and of all other parts of its set.

    Raises `ModelFormatError`, which names the part at fault.
    """
    paths = _part_paths(os.fspath(path))
    headers = []
    for index, part in enumerate(paths):
        header = read_header(part, file_index=index)
        _check_part(header, index, len(paths))
        headers.append(header)
    if is_packed(headers[0]):
        return _packed_model(headers[0])
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                other = paths[tensors[name].file]
                raise ModelFormatError(
                    header.path, name, f"expected each tensor in one part, found it in {other} too"
                )
            tensors[name] = tensor
    _check_total(headers, len(tensors))
    return Model(
        paths=tuple(paths),
        file_bytes=tuple([header.file_bytes for header in headers]),
        metadata=headers[0].metadata,
        tensors=tensors,
        fingerprint=_fingerprint(headers),
    )


def _packed_model(header: GgufHeader) -> Model:
    found = read_packed(header)
    return Model(
        paths=(header.path,),
        file_bytes=(header.file_bytes,),
        metadata=header.metadata,
        tensors=found.tensors,
        fingerprint=found.fingerprint,
        is_packed=True,
        checksums=found.checksums,
    )


def is_part_name(file_name: str) -> bool:
    """Whether a name says that the file is a part of a set."""
    return _PART_NAME.fullmatch(file_name) is not None


def _part_paths(path: str) -> list[str]:
    """The files of the set that `path` belongs to, in order; `[path]` for a single file."""
    directory, file_name = os.path.split(path)
    match = _PART_NAME.fullmatch(file_name)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ModelFormatError(
            path,
            "file name",
            f"expected part 1 to N of at most {MAX_PARTS}, found {number} of {count}",
        )
    names = [f"{match['name']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
    missing = [name for name in names if not _exists(Path(directory, name))]
    if missing and len(missing) < count:
        shown = ", ".join(missing[:_SHOWN_PARTS]) + (", …" if missing[_SHOWN_PARTS:] else "")
        raise ModelFormatError(
            path,
            "file name",
            f"expected all {count} parts in one folder, missing {len(missing)}: {shown}",
        )
    return [str(Path(directory, name)) for name in names]


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (OSError, ValueError):  # whatever the reason: opening the file will tell it
        return False
    return True


def _check_part(header: GgufHeader, index: int, n_parts: int) -> None:
    """Is this the part that its name says, of a set of this size?"""
    n_claimed = _split_value(header, "split.count")
    if n_claimed is None:
        if n_parts > 1:
            raise ModelFormatError(
                header.path,
                "split.count",
                f"expected {n_parts} as in the file name, found no such key",
            )
        return
    if not 1 <= n_claimed <= MAX_PARTS:
        raise ModelFormatError(
            header.path, "split.count", f"expected 1 to {MAX_PARTS}, found {n_claimed}"
        )
    if n_claimed != n_parts:
        advice = (
            "; the parts must keep their names NAME-00001-of-0000N.gguf" if n_parts == 1 else ""
        )
        raise ModelFormatError(
            header.path,
            "split.count",
            f"expected {n_parts} as in the file name, found {n_claimed}{advice}",
        )
    number = _split_value(header, "split.no")
    if number != index:
        found = "no such key" if number is None else str(number)
        raise ModelFormatError(
            header.path,
            "split.no",
            f"expected {index}, being part {index + 1} of {n_parts} by its name, found {found}",
        )


def _check_total(headers: list[GgufHeader], n_tensors: int) -> None:
    for header in headers:
        n_claimed = _split_value(header, "split.tensors.count")
        if n_claimed is None:
            if header is headers[0] and len(headers) > 1:
                raise ModelFormatError(
                    header.path, "split.tensors.count", "expected a number, found no such key"
                )
        elif n_claimed != n_tensors:
            raise ModelFormatError(
                header.path,
                "split.tensors.count",
                f"expected {n_tensors}, the tensors of all parts, found {n_claimed}; "
                "a part belongs to another set",
            )


def _split_value(header: GgufHeader, key: str) -> int | None:
    value = header.metadata.get(key)
    if value is None or type(value) is int:
        return value
    raise ModelFormatError(header.path, key, f"expected an integer, found {type(value).__name__}")


def _fingerprint(headers: list[GgufHeader]) -> str:
    digest = hashlib.sha256()
    for header in headers:
        digest.update(header.file_bytes.to_bytes(8, "little"))
        digest.update(header.digest)
    return digest.hexdigest()[:32]
