"""The JSON shapes of answers as the OpenAI API has them: completions and chat, whole and in chunks.

Beside these every answer has `timings`, named as llama-server names them, with the figures of the
experts. Knows no HTTP.
"""

from dataclasses import dataclass, field
from typing import Any

from coordinator.api.answer import Finish
from coordinator.text.tokenizer import Tokenizer
from shm.messages import Sampled
from shm.service_messages import AnswerFigures

MiB = 1024 * 1024


def usage(n_prompt: int, finish: Finish) -> dict[str, Any]:
    """Tokens of prompt and answer."""
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": finish.n_tokens,
        "total_tokens": n_prompt + finish.n_tokens,
        "prompt_tokens_details": {"cached_tokens": finish.figures.n_cached},
    }


def timings(figures: AnswerFigures) -> dict[str, Any]:
    """Where the time went, and how the experts were had."""
    n_computed = figures.n_prompt - figures.n_cached
    n_decoded = max(0, figures.n_tokens - 1)  # the first token comes with the prompt
    hit_rate = None
    if figures.expert_hits is not None and figures.expert_requests:
        hit_rate = round(figures.expert_hits / figures.expert_requests, 6)
    n_all = max(1, n_computed + figures.n_tokens)
    return {
        "cache_n": figures.n_cached,
        "queued_ms": _ms(figures.queued_ns),
        "prompt_n": n_computed,
        "prompt_ms": _ms(figures.prompt_ns),
        "prompt_per_second": _rate(n_computed, figures.prompt_ns),
        "predicted_n": figures.n_tokens,
        "predicted_ms": _ms(figures.decode_ns),
        "predicted_per_second": _rate(n_decoded, figures.decode_ns),
        "hit_rate": hit_rate,
        "mib_per_token": round(figures.bytes_read / MiB / n_all, 4),
    }


def _ms(duration_ns: int) -> float:
    return round(duration_ns / 1e6, 3)


def _rate(n: int, duration_ns: int) -> float:
    return round(n / (duration_ns / 1e9), 3) if duration_ns > 0 else 0.0


@dataclass(slots=True)
class Completion:
    """Of /v1/completions."""

    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    n_top: int | None
    _offset: int = field(default=0)  # characters of the answer so far

    def chunks_before(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return []

    def chunk(self, text: str, tokens: tuple[Sampled, ...], finish: str | None) -> dict[str, Any]:
        """One event of a stream."""
        return self._object(text, tokens, finish)

    def whole(self, text: str, tokens: tuple[Sampled, ...], finish: str) -> dict[str, Any]:
        """The answer in one."""
        return self._object(text, tokens, finish)

    def without_choice(self) -> dict[str, Any]:
        """The event that carries the usage."""
        return {**self._object("", (), None), "choices": []}

    def _object(self, text: str, tokens: tuple[Sampled, ...], finish: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self.n_top is not None else None
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }

    def _logprobs(self, tokens: tuple[Sampled, ...]) -> dict[str, Any]:
        texts = [_text(self.tokenizer, drawn.token) for drawn in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [drawn.logprob for drawn in tokens],
            "top_logprobs": [
                {_text(self.tokenizer, top.token): top.logprob for top in drawn.top}
                for drawn in tokens
            ],
            "text_offset": offsets,
        }


@dataclass(slots=True)
class Chat:
    """Of /v1/chat/completions."""

    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    n_top: int | None

    def chunks_before(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return [self._chunk({"role": "assistant", "content": ""}, None, None)]

    def chunk(self, text: str, tokens: tuple[Sampled, ...], finish: str | None) -> dict[str, Any]:
        """One event of a stream."""
        delta = {"content": text} if text else {}
        return self._chunk(delta, self._logprobs(tokens) if tokens else None, finish)

    def whole(self, text: str, tokens: tuple[Sampled, ...], finish: str) -> dict[str, Any]:
        """The answer in one."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish,
        }
        return {**self._head("chat.completion"), "choices": [choice]}

    def without_choice(self) -> dict[str, Any]:
        """The event that carries the usage."""
        return {**self._head("chat.completion.chunk"), "choices": []}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, tokens: tuple[Sampled, ...]) -> dict[str, Any] | None:
        if self.n_top is None:
            return None
        return {
            "content": [
                {
                    **self._token(drawn.token, drawn.logprob),
                    "top_logprobs": [self._token(top.token, top.logprob) for top in drawn.top],
                }
                for drawn in tokens
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": _text(self.tokenizer, token),
            "logprob": logprob,
            "bytes": list(self.tokenizer.token_bytes(token)),
        }


Shape = Completion | Chat


def _text(tokenizer: Tokenizer, token: int) -> str:
    """What a token prints, or its name in the vocabulary if it prints nothing."""
    printed = tokenizer.token_bytes(token)
    return printed.decode("utf-8", "replace") if printed else tokenizer.token_text(token)
