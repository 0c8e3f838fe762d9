"""What the text behind a flag may be: one `Kind` per sort of value.

A kind says what it expects in words, so that every refused value gets the same sort of line, and
what shell completion can offer. It does not know which flags exist (see `config`).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.command.sizes import POOL_EXAMPLES, SIZE_EXAMPLES, parse_pool, parse_size

MAX_TEXT_CHARACTERS = 1_000_000  # an argument longer than this is a mistake; -f reads files
MAX_STOP_BYTES = 1_000
LARGEST_SEED = 2**63 - 1  # what a control message carries


class ConfigError(Exception):
    """A setting is wrong: one line with flag, what was expected, what was found, what to do."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of value: `parse` raises `ValueError` for a text that is not `expected`."""

    metavar: str
    expected: str
    parse: Callable[[str], Any]
    choices: tuple[str, ...] = ()
    is_path: bool = False


def integer(low: int, high: int, metavar: str = "N", *, step: int = 1) -> Kind:
    """A decimal integer in ``[low, high]``, a multiple of `step`."""

    def parse(text: str) -> int:
        # int() also takes '1_000', ' 7 ' and digits of other scripts; a flag takes what it shows
        if re.fullmatch(r"[+-]?\d{1,20}", text, re.ASCII) is None:
            raise ValueError(text)
        value = int(text)
        if not low <= value <= high or value % step:
            raise ValueError(text)
        return value

    kind = "an integer" if step == 1 else f"a multiple of {step}"
    return Kind(metavar, f"{kind} from {low} to {high}", parse)


def real(low: float, high: float, *, above_low: bool = False, metavar: str = "X") -> Kind:
    """A finite number in ``[low, high]``, or in ``(low, high]`` with `above_low`."""
    span = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"

    def parse(text: str) -> float:
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII) is None:
            raise ValueError(text)
        value = float(text)
        if not math.isfinite(value) or not low <= value <= high or (above_low and value == low):
            raise ValueError(text)
        return value

    return Kind(metavar, f"a number {span}", parse)


def choice(*names: str) -> Kind:
    """One of a few names."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return Kind("|".join(names), "one of " + ", ".join(names), parse, choices=names)


def _text(text: str) -> str:
    # a lone surrogate is a byte that was not UTF-8 on the command line
    text.encode("utf-8")
    if not text or len(text) > MAX_TEXT_CHARACTERS or "\0" in text:
        raise ValueError(text)
    return text


def _stop(text: str) -> str:
    if not 0 < len(text.encode("utf-8")) <= MAX_STOP_BYTES:
        raise ValueError(text)
    return text


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError(text)
    return Path(text)


def _token_ids(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII) is None:
        raise ValueError(text)
    return tuple(int(part) for part in text.split(","))


TEXT = Kind("TEXT", "some UTF-8 text", _text)
STOP = Kind("TEXT", f"UTF-8 text of 1 to {MAX_STOP_BYTES} bytes", _stop)
PATH = Kind("FILE", "a path", _path, is_path=True)
TOKEN_IDS = Kind("IDS", "token ids such as 5,77,300", _token_ids)
SIZE = Kind("SIZE", SIZE_EXAMPLES, parse_size)
POOL = Kind("SIZE", POOL_EXAMPLES, parse_pool)
SEED = integer(0, LARGEST_SEED)
PORT = integer(1, 65535, "PORT")


def parse_value(flag: str, kind: Kind, text: str, advice: str) -> Any:
    """The value of one flag; raises `ConfigError` with the whole line.

    `found` is cut and escaped: the text comes from outside and must not reach a terminal raw.
    """
    try:
        return kind.parse(text)
    except ValueError:
        found = ascii(text if len(text) <= 60 else text[:57] + "...")
        raise ConfigError(f"{flag}: expected {kind.expected}, found {found}; {advice}") from None
