"""Text to tokens and back, with the parameters and shapes that llama-server has for it."""

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.errors import ApiError, bad, json_response
from coordinator.api.json_body import max_body_bytes, read_json
from coordinator.api.service import Service
from coordinator.text.tokenizer import Tokenizer


async def tokenize(service: Service, request: Request) -> Response:
    """POST /tokenize, as llama-server has it."""
    body = await read_json(request, max_body_bytes(service.settings.n_context))
    allowed = {"content": "", "add_special": False, "parse_special": True, "with_pieces": False}
    for name in body:
        if name not in allowed:
            raise ApiError(400, f"{name!a:.60}: this parameter is not supported", param=name[:60])
    given: dict[str, Any] = allowed | body
    for name, default in allowed.items():
        if type(given[name]) is not type(default):
            raise bad(name, "a text" if name == "content" else "true or false", given[name])
    encode = functools.partial(
        service.tokenizer.encode,
        given["content"],
        add_special=bool(given["add_special"]),
        parse_special=bool(given["parse_special"]),
    )
    tokens = await service.tokens_of(encode, "content")
    if not given["with_pieces"]:
        return json_response({"tokens": tokens})
    pieces = [{"id": token, "piece": _piece(service.tokenizer, token)} for token in tokens]
    return json_response({"tokens": pieces})


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Text, or the bytes of a part of a character."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(service: Service, request: Request) -> Response:
    """POST /detokenize, as llama-server has it."""
    body = await read_json(request, max_body_bytes(service.settings.n_context))
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or set(body) != {"tokens"}:
        raise bad("tokens", "a list of token ids and nothing else", tokens)
    return json_response(
        {"content": service.tokenizer.decode(token_ids(service, "tokens", tokens))}
    )


def token_ids(service: Service, param: str, tokens: list[Any]) -> list[int]:
    """Ids of the vocabulary; raises `ApiError`."""
    size = min(service.settings.vocabulary_size, service.tokenizer.vocabulary_size)
    for token in tokens:
        if type(token) is not int or not 0 <= token < size:
            raise bad(param, f"token ids below {size}", token)
    return tokens
