"""Conversations become prompts: by the model's own template, or as a plain transcript without one.

The template is rendered in a process of its own (`render`), one conversation at a time; a process
that fails is replaced for the next one.
"""

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from coordinator.api.errors import ApiError, bad
from coordinator.api.render import LENGTH, framed
from coordinator.text.tokenizer import Tokenizer

RENDER_SECONDS = 5.0
START_SECONDS = 30.0  # more, where the process must be started first: a busy machine takes long
MAX_MESSAGES = 1024
ROLES = ("system", "developer", "user", "assistant")
# what clients send back of an answer, when it says nothing
EMPTY_FIELDS = (
    "refusal",
    "annotations",
    "audio",
    "function_call",
    "tool_calls",
    "reasoning_content",
)
SPEAKERS = {"user": "User", "assistant": "Assistant"}
TRANSCRIPT_STOP = "\nUser:"


class Renderer(Protocol):
    """The running process."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self) -> int:
        """Until it is dead."""


Start = Callable[[socket.socket], Renderer]


def read_messages(value: Any) -> list[dict[str, str]]:
    """The parameter `messages`: role and text of each; raises `ApiError`."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise bad("messages", f"1 to {MAX_MESSAGES} messages", value)
    return [_message(f"messages[{index}]", item) for index, item in enumerate(value)]


def _message(where: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad(where, "an object", value)
    role = value.get("role")
    if role not in ROLES:
        raise bad(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    for name, found in value.items():
        if name not in ("role", "content", "name") and not (name in EMPTY_FIELDS and not found):
            raise ApiError(
                400,
                f"{where}.{name!a:.60}: this field is not supported; leave it out",
                param=where,
                code="unsupported_parameter",
            )
    message = {
        "role": "system" if role == "developer" else role,
        "content": _content(f"{where}.content", value.get("content"), role),
    }
    name = value.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise bad(f"{where}.name", "a text", name)
        message["name"] = name
    return message


def _content(where: str, value: Any, role: str) -> str:
    """Text, or parts that are text."""
    if isinstance(value, str):
        return value
    if value is None and role == "assistant":
        return ""
    if not isinstance(value, list):
        raise bad(where, "a text, or a list of parts", value)
    texts = []
    for part in value:
        is_text = isinstance(part, dict) and set(part) == {"type", "text"}
        if not is_text or part["type"] != "text" or not isinstance(part["text"], str):
            raise bad(
                where, "parts with type text and text; images and sound are not supported", part
            )
        texts.append(part["text"])
    return "".join(texts)


def transcript(messages: list[dict[str, str]]) -> str:
    """A conversation for a model that was trained for none: who speaks, then what is said.

    System texts come first, as they are. The answer ends where the user would speak
    (`TRANSCRIPT_STOP`).
    """
    lines = [m["content"] for m in messages if m["role"] == "system"]
    for message in messages:
        if message["role"] != "system":
            lines.append(f"{SPEAKERS[message['role']]}: {message['content']}")
    return "\n".join([*lines, "Assistant:"])


class ChatTemplate:
    """The template of a model file, or none. `start` starts the process that renders."""

    def __init__(self, metadata: Mapping[str, object], tokenizer: Tokenizer, start: Start) -> None:
        template = metadata.get("tokenizer.chat_template")
        self._template = template if isinstance(template, str) and template.strip() else None
        self._tokenizer = tokenizer
        self._start = start
        self._lock = asyncio.Lock()
        self._process: Renderer | None = None
        self._connection: socket.socket | None = None

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings that belong to the form of the prompt."""
        return () if self._template is not None else (TRANSCRIPT_STOP,)

    @property
    def warnings(self) -> list[str]:
        """Lines for the operator."""
        if self._template is not None:
            return []
        return [
            "the model has no chat template: chats become a plain transcript (User:, Assistant:)"
        ]

    async def prompt(self, messages: list[dict[str, str]]) -> str:
        """The text that the model continues; raises `ApiError`."""
        if self._template is None:
            return transcript(messages)
        request = {
            "template": self._template,
            "messages": messages,
            "bos_token": self._special(self._tokenizer.bos_id),
            "eos_token": self._special(self._tokenizer.eos_id),
        }
        async with self._lock:
            seconds = RENDER_SECONDS + (START_SECONDS if self._process is None else 0)
            try:
                async with asyncio.timeout(seconds):
                    found = await self._ask(json.dumps(request).encode())
            except (TimeoutError, OSError) as error:
                self.close()
                why = "is too slow" if isinstance(error, TimeoutError) else "takes too much"
                raise ApiError(
                    400,
                    f"messages: the model's chat template {why}; use /v1/completions",
                    param="messages",
                    code="chat_template_failed",
                ) from error
            except asyncio.CancelledError:
                self.close()  # its answer would be taken for that of the next
                raise
        if "error" in found:
            raise ApiError(
                400,
                f"messages: the model's chat template refuses them: {found['error']}",
                param="messages",
                code="chat_template_failed",
            )
        text: str = found["text"]
        return text

    def encode(self, text: str) -> list[int]:
        """Its tokens. A template that writes the first token itself gets no second one."""
        tokenizer = self._tokenizer
        bos = self._special(tokenizer.bos_id)
        starts_itself = bool(bos) and self._template is not None and text.startswith(bos)
        tokens = tokenizer.encode(text, add_special=not starts_itself, parse_special=True)
        if tokenizer.add_eos and not starts_itself and tokens and tokens[-1] == tokenizer.eos_id:
            tokens.pop()  # the conversation goes on
        return tokens

    def close(self) -> None:
        """End the process, if there is one."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _special(self, token: int | None) -> str:
        return self._tokenizer.token_text(token) if token is not None else ""

    async def _ask(self, data: bytes) -> dict[str, str]:
        loop = asyncio.get_running_loop()
        if self._process is None or self._connection is None:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with theirs:
                self._process, self._connection = self._start(theirs), ours
        await loop.sock_sendall(self._connection, framed(data))
        (length,) = LENGTH.unpack(await self._receive(LENGTH.size))
        answer: dict[str, str] = json.loads(await self._receive(length))
        return answer

    async def _receive(self, n_bytes: int) -> bytes:
        assert self._connection is not None
        data = bytearray()
        while len(data) < n_bytes:
            part = await asyncio.get_running_loop().sock_recv(self._connection, n_bytes - len(data))
            if not part:
                raise ConnectionResetError("the process that renders is dead")
            data += part
        return bytes(data)
