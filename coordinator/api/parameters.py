"""The parameters of a request: every one is honoured, or refused by its name.

`null` means "not given". A parameter that this service does not have is accepted in the one value
that changes nothing (`NEUTRAL`), so that clients which send all they know still work.
"""

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from coordinator.api.errors import ApiError, bad
from shm.messages import Sampling

MAX_STOPS, MAX_STOP_BYTES = 16, 256
MAX_TOP_LOGPROBS = 20
LARGEST = 2**63 - 1
DEFAULT_COMPLETION_TOKENS = 16  # as the OpenAI API has it for /v1/completions


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for beside its text. `max_tokens` None: until the context is full;
    `n_top_logprobs` None: no logprobs."""

    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    n_top_logprobs: int | None
    is_stream: bool
    include_usage: bool


def _real(low: float, high: float, *, above_low: bool = False) -> Callable[[str, Any], float]:
    span = f"a number above {low:g}, at most {high:g}" if above_low else f"{low:g} to {high:g}"

    def read(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise bad(name, span, value)
        if above_low and value == low:
            raise bad(name, span, value)
        return float(value)

    return read


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise bad(name, f"an integer from {low} to {high}", value)
        return value

    return read


def _boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise bad(name, "true or false", value)
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise bad(name, f"a text or at most {MAX_STOPS} texts", value)
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop.encode()) <= MAX_STOP_BYTES:
            raise bad(name, f"texts of 1 to {MAX_STOP_BYTES} bytes", stop)
    return tuple(stops)


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict) or set(value) - {"include_usage"}:
        raise bad(name, "an object with include_usage at most", value)
    return _boolean(f"{name}.include_usage", value.get("include_usage", False))


READ: dict[str, Callable[[str, Any], Any]] = {
    "temperature": _real(0, 100),
    "top_p": _real(0, 1, above_low=True),
    "min_p": _real(0, 1),
    "top_k": _integer(-1, 2**31 - 1),  # 0 and -1: off
    "frequency_penalty": _real(-2, 2),
    "presence_penalty": _real(-2, 2),
    "repeat_penalty": _real(0, 100, above_low=True),
    "seed": _integer(-1, LARGEST),  # -1: drawn
    "max_tokens": _integer(1, LARGEST),
    "stop": _stops,
    "stream": _boolean,
    "stream_options": _stream_options,
}
OF_COMPLETIONS = {"logprobs": _integer(0, MAX_TOP_LOGPROBS)}
OF_CHAT = {
    "logprobs": _boolean,
    "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
    "max_completion_tokens": _integer(1, LARGEST),
}
ANY_TEXT = "a text, which is not used"
# parameter -> the values that it may have, since they ask for nothing
NEUTRAL: dict[str, Collection[Any] | str] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "cache_prompt": (True,),  # it always is
    "user": ANY_TEXT,
    "safety_identifier": ANY_TEXT,
    "prompt_cache_key": ANY_TEXT,
}


def completion_parameters(body: dict[str, Any]) -> Wanted:
    """Of /v1/completions; raises `ApiError`."""
    found = _read(body, READ | OF_COMPLETIONS, {"model", "prompt"})
    max_tokens = found.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
    return _wanted(found, max_tokens, found.get("logprobs"))


def chat_parameters(body: dict[str, Any]) -> Wanted:
    """Of /v1/chat/completions; raises `ApiError`."""
    found = _read(body, READ | OF_CHAT, {"model", "messages"})
    n_top = found.get("top_logprobs")
    if n_top is not None and not found.get("logprobs"):
        raise ApiError(400, "top_logprobs: expected logprobs true with it", param="top_logprobs")
    most, older = found.get("max_completion_tokens"), found.get("max_tokens")
    if most is not None and older is not None and most != older:
        raise ApiError(
            400,
            "max_completion_tokens: expected the same as max_tokens; drop one",
            param="max_completion_tokens",
        )
    n_logprobs = (n_top or 0) if found.get("logprobs") else None
    return _wanted(found, most if most is not None else older, n_logprobs)


def _read(
    body: dict[str, Any], readers: dict[str, Callable[[str, Any], Any]], elsewhere: set[str]
) -> dict[str, Any]:
    """The values of the parameters that were given."""
    found = {}
    for name, value in body.items():
        if name in elsewhere:
            continue
        if name not in readers and name not in NEUTRAL:
            raise ApiError(
                400,
                f"{name!a:.60}: this parameter is not supported; leave it out",
                param=name[:60],
                code="unsupported_parameter",
            )
        if value is None:
            continue
        if name in readers:
            found[name] = readers[name](name, value)
        else:
            _check_neutral(name, value)
    return found


def _check_neutral(name: str, value: Any) -> None:
    allowed = NEUTRAL[name]
    if isinstance(allowed, str):
        if not isinstance(value, str):
            raise bad(name, allowed, value)
        return
    # True == 1 in Python, not here
    if not any(value == item and type(value) is type(item) for item in allowed):
        spelled = " or ".join(repr(item) for item in allowed)
        raise ApiError(
            400,
            f"{name}: only {spelled} is supported; leave it out",
            param=name,
            code="unsupported_parameter",
        )


def _wanted(found: dict[str, Any], max_tokens: int | None, n_logprobs: int | None) -> Wanted:
    if "stream_options" in found and not found.get("stream"):
        raise ApiError(400, "stream_options: expected stream true with it", param="stream_options")
    seed = found.get("seed", -1)
    sampling = Sampling(
        temperature=found.get("temperature", 1.0),
        top_k=max(0, found.get("top_k", 0)),
        top_p=found.get("top_p", 1.0),
        min_p=found.get("min_p", 0.0),
        repeat_penalty=found.get("repeat_penalty", 1.0),
        seed=seed if seed >= 0 else secrets.randbelow(2**32),
        frequency_penalty=found.get("frequency_penalty", 0.0),
        presence_penalty=found.get("presence_penalty", 0.0),
    )
    return Wanted(
        sampling,
        max_tokens,
        found.get("stop", ()),
        n_logprobs,
        found.get("stream", False),
        found.get("stream_options", False),
    )
