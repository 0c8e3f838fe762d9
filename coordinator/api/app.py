"""The routes of the service. What is asked is read here, answered elsewhere."""

import functools
import secrets
import time
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from coordinator.api.chat import read_messages
from coordinator.api.errors import ApiError, bad, error_response, json_response, on_api_error
from coordinator.api.json_body import max_body_bytes, read_json
from coordinator.api.parameters import Wanted, chat_parameters, completion_parameters
from coordinator.api.respond import Answer
from coordinator.api.service import Service
from coordinator.api.settings import HttpSettings
from coordinator.api.shapes import Chat, Completion, Shape
from coordinator.api.token_routes import detokenize, token_ids, tokenize
from coordinator.text.stream import TextStream

PAGE = Path(__file__).parent.parent / "page"
PAGE_FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}


def build_app(service: Service) -> Starlette:
    """The application; `service` is reached by its routes."""
    posts = {
        "/v1/completions": completions,
        "/v1/chat/completions": chat_completions,
        "/tokenize": tokenize,
        "/detokenize": detokenize,
    }
    gets = {
        "/health": health,
        "/v1/health": health,
        "/v1/models": models,
        "/v1/models/{name:path}": one_model,
        "/status.json": status,
    }
    routes = [
        *(
            Route(path, functools.partial(run, service), methods=["POST"])
            for path, run in posts.items()
        ),
        *(
            Route(path, functools.partial(run, service), methods=["GET"])
            for path, run in gets.items()
        ),
        *(Route(path, page, methods=["GET"]) for path in PAGE_FILES),
    ]
    return Starlette(
        routes=routes,
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_error,
            Exception: on_fault,
        },
    )


async def on_http_error(_: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = {404: "there is nothing at this path", 405: "this path has another method"}
    text = message.get(error.status_code, error.detail)
    return error_response(ApiError(error.status_code, text, headers=error.headers))


async def on_fault(_: Request, error: Exception) -> Response:
    """A fault of ours: the server writes it to standard error."""
    return error_response(ApiError(500, f"internal: {type(error).__name__}; please report it"))


# Generation


async def completions(service: Service, request: Request) -> Answer:
    """POST /v1/completions."""
    body = await read_json(request, max_body_bytes(service.settings.n_context))
    check_model(service.settings, body)
    wanted = completion_parameters(body)
    service.backend.check_open()
    tokens = await _prompt_tokens(service, body.get("prompt"))
    shape = Completion(
        f"cmpl-{secrets.token_hex(12)}",
        int(time.time()),
        service.settings.names[0],
        service.tokenizer,
        wanted.n_top_logprobs,
    )
    return _answer(service, wanted, tokens, shape, wanted.stop, "prompt")


async def chat_completions(service: Service, request: Request) -> Answer:
    """POST /v1/chat/completions."""
    body = await read_json(request, max_body_bytes(service.settings.n_context))
    check_model(service.settings, body)
    wanted = chat_parameters(body)
    messages = read_messages(body.get("messages"))
    service.backend.check_open()
    text = await service.template.prompt(messages)
    encode = functools.partial(service.template.encode, text)
    tokens = await service.tokens_of(encode, "messages")
    shape = Chat(
        f"chatcmpl-{secrets.token_hex(12)}",
        int(time.time()),
        service.settings.names[0],
        service.tokenizer,
        wanted.n_top_logprobs,
    )
    stop = (*wanted.stop, *service.template.stop)
    return _answer(service, wanted, tokens, shape, stop, "messages")


def check_model(settings: HttpSettings, body: dict[str, Any]) -> None:
    """The parameter `model`, which may be left out; raises `ApiError`."""
    name = body.get("model")
    if name is not None and name not in settings.names:
        raise ApiError(
            404,
            f"model: expected {settings.names[0]}, found {name!a:.60}",
            param="model",
            code="model_not_found",
        )


async def _prompt_tokens(service: Service, prompt: Any) -> list[int]:
    """The parameter `prompt`: a text, token ids, or a list with one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        encode = functools.partial(
            service.tokenizer.encode, prompt, add_special=True, parse_special=True
        )
        return await service.tokens_of(encode, "prompt")
    if not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
        raise bad("prompt", "one text, or token ids", prompt)
    return token_ids(service, "prompt", prompt)


def _answer(
    service: Service,
    wanted: Wanted,
    tokens: list[int],
    shape: Shape,
    stop: tuple[str, ...],
    param: str,
) -> Answer:
    """Begin a generation."""
    n_context = service.settings.n_context
    if not tokens:
        raise bad(param, "some text", "")
    if len(tokens) >= n_context:
        raise ApiError(
            400,
            f"{param}: expected fewer than {n_context} tokens (the context), found {len(tokens)}",
            param=param,
            code="context_length_exceeded",
        )
    room = n_context - len(tokens)
    generation = service.backend.submit(
        tuple(tokens),
        wanted.sampling,
        min(room, wanted.max_tokens or room),
        service.tokenizer.stop_ids,
        wanted.n_top_logprobs or 0,
    )
    return Answer(
        generation,
        TextStream(service.tokenizer, stop),
        shape,
        len(tokens),
        is_stream=wanted.is_stream,
        include_usage=wanted.include_usage,
    )


# Everything else


async def health(service: Service, _: Request) -> Response:
    """GET /health: 200 only when a request would be answered."""
    state = service.backend.state
    body = {"status": "ok" if state.can_answer else "unavailable", "state": state.state}
    return json_response(body, 200 if state.can_answer else 503)


async def models(service: Service, _: Request) -> Response:
    """GET /v1/models."""
    return json_response({"object": "list", "data": [_model(service)]})


async def one_model(service: Service, request: Request) -> Response:
    """GET /v1/models/NAME."""
    check_model(service.settings, {"model": request.path_params["name"]})
    return json_response(_model(service))


def _model(service: Service) -> dict[str, Any]:
    settings = service.settings
    return {
        "id": settings.names[0],
        "object": "model",
        "created": service.started,
        "owned_by": "moe-coord",
        "meta": {"n_ctx": settings.n_context, "n_vocab": settings.vocabulary_size},
    }


async def status(service: Service, _: Request) -> Response:
    """GET /status.json (its shape: `coordinator.serving.status`)."""
    text = await service.backend.status()
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})


async def page(request: Request) -> Response:
    """The status page, where it is installed."""
    path = PAGE / PAGE_FILES[request.url.path]
    if path.is_file():
        return FileResponse(path)
    return PlainTextResponse("moe-coord: the API is at /v1, the status at /status.json\n")
