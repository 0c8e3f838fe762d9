"""Sizes as people write them: ``800M``, ``1.5G``, ``40%``, ``all``.

A letter alone and the ``iB`` form are powers of 1024, the ``B`` form is powers of 1000, as in `dd`:
``1M`` = ``1MiB`` = 1,048,576 bytes, ``1MB`` = 1,000,000 bytes. This module knows no flag.
"""

import re
from dataclasses import dataclass

LARGEST_BYTES = 2**60  # more than any machine has; keeps every sum of sizes inside 63 bits
SIZE_EXAMPLES = "a size such as 800M, 1.5G or 1048576"
POOL_EXAMPLES = "a size such as 800M, a share such as 40%, or all"

_EXPONENT = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([KMGT]?)(I?B)?", re.ASCII | re.IGNORECASE)
_NAMES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What `--pool` asks for: bytes, or a share of all experts in (0, 1]. One of the two is set."""

    n_bytes: int | None = None
    share: float | None = None

    def bytes_of(self, whole_bytes: int) -> int:
        """Bytes of the pool, `whole_bytes` being those of all experts: never more."""
        if self.n_bytes is not None:
            return min(self.n_bytes, whole_bytes)
        assert self.share is not None
        return round(self.share * whole_bytes)

    def __str__(self) -> str:
        if self.share is None:
            return str(self.n_bytes)
        return "all" if self.share == 1.0 else f"{self.share * 100:g}%"


def parse_size(text: str) -> int:
    """Bytes of a size, rounded down. Raises `ValueError` for anything else, also for 0."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    number, letter, suffix = match.groups()
    unit = 1000 if suffix is not None and suffix.upper() == "B" else 1024
    if len(number) > 25:
        raise ValueError(f"too many digits: {text!r}")
    whole, _, fraction = number.partition(".")
    # integers, not floats: 9007199254740993 bytes stay what was typed
    scaled = int((whole or "0") + fraction) * unit ** _EXPONENT[letter.upper()]
    n_bytes: int = scaled // 10 ** len(fraction)
    if not 1 <= n_bytes <= LARGEST_BYTES:
        raise ValueError(f"not between 1 byte and 1024 PiB: {text!r}")
    return n_bytes


def parse_pool(text: str) -> PoolSize:
    """A pool as bytes, as a percentage of the experts, or ``all``. Raises `ValueError`."""
    stripped = text.strip().lower()
    if stripped == "all":
        return PoolSize(share=1.0)
    if not stripped.endswith("%"):
        return PoolSize(n_bytes=parse_size(text))
    if re.fullmatch(r"\d{1,3}(\.\d{1,6})?", stripped[:-1], re.ASCII) is None:
        raise ValueError(f"not a percentage: {text!r}")
    share = float(stripped[:-1]) / 100
    if not 0 < share <= 1:
        raise ValueError(f"not above 0 and at most 100 percent: {text!r}")
    return PoolSize(share=share)


def format_size(n_bytes: int) -> str:
    """Three significant digits in the largest unit that fits: ``465 MiB``, ``1.50 GiB``."""
    value = float(n_bytes)
    for name in _NAMES:
        if value < 999.5 or name == _NAMES[-1]:
            break
        value /= 1024
    if name == "bytes":
        return f"{n_bytes} bytes"
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {name}"
