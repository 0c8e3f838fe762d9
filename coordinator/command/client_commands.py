"""The sub-commands that talk to a running service, and their flags."""

from dataclasses import dataclass
from pathlib import Path

from coordinator.command.config import Config
from coordinator.command.flag_values import PATH, SEED, TEXT, Kind, integer, real
from coordinator.command.flags import flag

DEFAULT_URL = "http://127.0.0.1:8080"
SERVICE_FLAGS, DRAWING = "the service", "how tokens are drawn"


def _url(text: str) -> str:
    scheme, separator, rest = text.partition("://")
    if scheme not in ("http", "https") or not separator or not rest or not rest.isascii():
        raise ValueError(text)
    if any(character <= " " for character in rest):
        raise ValueError(text)
    return text.rstrip("/")


URL = Kind("URL", f"an address such as {DEFAULT_URL}", _url)


@dataclass(frozen=True, slots=True)
class TopCommand:
    """`moe-coord top`: the status of a running service in the terminal."""

    url: str = flag(DEFAULT_URL, "--url", URL, SERVICE_FLAGS, "the service to watch")
    api_key: str | None = flag(
        None, "--api-key", TEXT, SERVICE_FLAGS, "its key, or a file whose first line is one",
        default_text="none",
    )  # fmt: skip
    interval_seconds: float = flag(
        1.0, "--interval", real(0.2, 3600, metavar="SECONDS"), SERVICE_FLAGS, "how often to look"
    )
    once: bool = flag(
        False,
        "--once",
        None,
        SERVICE_FLAGS,
        "look once and print it, as where there is no terminal",
    )


@dataclass(frozen=True, slots=True)
class ChatArguments:
    """What `moe-coord chat` has beside the flags of the engine."""

    url: str | None = flag(
        None,
        "--url",
        URL,
        SERVICE_FLAGS,
        "talk to this running service; without it chat has its own",
    )
    api_key: str | None = flag(
        None, "--api-key", TEXT, SERVICE_FLAGS, "its key, or a file whose first line is one",
        default_text="none",
    )  # fmt: skip
    system: str | None = flag(
        None, "--system", TEXT, SERVICE_FLAGS, "what the model is told before the conversation",
        default_text="nothing",
    )  # fmt: skip
    history: Path | None = flag(
        None, "--history", PATH, SERVICE_FLAGS, "file of the lines typed before",
        default_text="~/.local/state/moe-coord/chat-history",
    )  # fmt: skip
    max_tokens: int | None = flag(
        None, "-n --max-tokens", integer(1, 2**31 - 1), DRAWING, "longest answer",
        default_text="what the context has room for",
    )  # fmt: skip
    temperature: float = flag(
        0.8, "--temperature", real(0, 2), DRAWING, "0 takes the likeliest token (greedy)"
    )
    top_p: float = flag(
        0.95, "--top-p", real(0, 1, above_low=True), DRAWING,
        "draw from the likeliest tokens that together reach this probability",
    )  # fmt: skip
    seed: int | None = flag(
        None, "--seed", SEED, DRAWING, "the same seed gives the same answers",
        default_text="drawn for each",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """`moe-coord chat`: a conversation. `engine` are the flags of a service of its own, as typed
    settings; None where a running one is talked to."""

    arguments: ChatArguments
    engine: tuple[Config, frozenset[str]] | None
