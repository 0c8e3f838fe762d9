"""One entry of the corpus of bad GGUF files; the corpus is `bad_gguf.bad_files`."""

from dataclasses import dataclass

DATA = bytes(4096)  # enough for every tensor that a case means to be whole


@dataclass(frozen=True, slots=True)
class BadFile:
    """`fragment` is in the refusal's line; `byte` is where it must point, when that is one byte."""

    name: str
    content: bytes
    fragment: str
    byte: int | None = None
