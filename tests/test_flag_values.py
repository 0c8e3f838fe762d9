from pathlib import Path

import pytest

from coordinator.command.flag_values import (
    PATH,
    STOP,
    TEXT,
    TOKEN_IDS,
    ConfigError,
    Kind,
    choice,
    integer,
    parse_value,
    real,
)

ACCEPTED = [
    (integer(0, 5), "0", 0),
    (integer(0, 5), "+5", 5),
    (integer(-3, 5), "-3", -3),
    (integer(64, 2048, step=64), "128", 128),
    (real(0, 1), "1", 1.0),
    (real(0, 1), ".5", 0.5),
    (real(0, 1), "5e-1", 0.5),
    (choice("a", "b"), "b", "b"),
    (TEXT, "Grüße 世界", "Grüße 世界"),
    (TEXT, "-", "-"),
    (STOP, "\n", "\n"),
    (PATH, "a b/ü.gguf", Path("a b/ü.gguf")),
    (TOKEN_IDS, "5,77,300", (5, 77, 300)),
]
REFUSED = [
    (integer(0, 5), "6"),
    (integer(0, 5), "-1"),
    (integer(0, 5), "1.0"),
    (integer(0, 5), "٣"),
    (integer(0, 5), " 3"),
    (integer(0, 5000), "1_000"),
    (integer(0, 5), ""),
    (integer(0, 5), "9" * 5000),
    (integer(64, 2048, step=64), "100"),
    (real(0, 1), "nan"),
    (real(0, 1), "inf"),
    (real(0, 1), "1e999"),
    (real(0, 1), "1.0001"),
    (real(0, 1, above_low=True), "0"),
    (real(0, 1), "0x1"),
    (choice("a", "b"), "A"),
    (TEXT, ""),
    (TEXT, "a\0b"),
    (TEXT, "\udcff"),
    (STOP, "x" * 1001),
    (PATH, ""),
    (PATH, "a\0b"),
    (TOKEN_IDS, "5,,7"),
    (TOKEN_IDS, "5, 7"),
    (TOKEN_IDS, "-1"),
    (TOKEN_IDS, "9999999999"),
]


@pytest.mark.parametrize(("kind", "text", "value"), ACCEPTED)
def test_accepted(kind: Kind, text: str, value: object) -> None:
    assert parse_value("--flag", kind, text, "advice") == value


@pytest.mark.parametrize(("kind", "text"), REFUSED)
def test_refused_in_one_line(kind: Kind, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_value("--flag", kind, text, "do this")
    line = str(caught.value)
    assert line.startswith(f"--flag: expected {kind.expected}, found ")
    assert line.endswith("; do this")
    assert line.isprintable()
    assert len(line) < 250


def test_what_was_found_cannot_reach_the_terminal_raw() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_value("--n", integer(0, 5), "\x1b[2J\n7", "do this")
    assert r"\x1b[2J\n7" in str(caught.value)
