"""The process that renders chat templates: ``python -P -m coordinator.api.render``.

A template comes from the model file and is a program of a stranger. Here it can reach nothing: the
environment is sandboxed, memory, processor time and open files are limited, and whoever asked kills
the process when it takes too long. It ends when its standard input does.

Standard input is a socket. A request is a length (4 bytes, little endian) and JSON: `template`,
`messages`, `bos_token`, `eos_token`. The answer is written likewise: `text`, or `error`.
"""

import json
import resource
import socket
import struct
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 512 << 20  # of addresses: Python and jinja2 take some 40 MiB
PROCESSOR_SECONDS = 2  # for one rendering
MAX_TEXT_BYTES = 4 << 20
LENGTH = struct.Struct("<I")


class RenderError(Exception):
    """The template refused (`raise_exception`), with its own words."""


def main() -> int:
    """Until standard input ends."""
    limit()
    with socket.socket(fileno=sys.stdin.fileno()) as connection:
        while (data := receive(connection)) is not None:
            allow_time()
            connection.sendall(framed(json.dumps(answer(json.loads(data))).encode()))
    return 0


def limit() -> None:
    """Of this process, for good."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def allow_time() -> None:
    """The limit counts from the start of the process: it moves on with every rendering."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + PROCESSOR_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def answer(request: dict[str, Any]) -> dict[str, str]:
    """The text of a conversation, or why there is none."""
    try:
        text = render(**request)
    except RenderError as error:
        return {"error": str(error)[:200]}
    except TemplateError as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    except Exception as error:  # whatever a program of a stranger raises
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    if len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        return {"error": f"the text is longer than {MAX_TEXT_BYTES} bytes"}
    return {"text": text}


def render(template: str, messages: list[dict[str, Any]], bos_token: str, eos_token: str) -> str:
    """Apply a template as its writers expect it to be applied (Hugging Face's conventions)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template).render(
        messages=messages,
        add_generation_prompt=True,
        bos_token=bos_token,
        eos_token=eos_token,
        tools=None,
        documents=None,
    )


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Plain JSON: the filter of jinja2 escapes it for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: object) -> NoReturn:
    raise RenderError(str(message))


def framed(data: bytes) -> bytes:
    """With its length before it."""
    return LENGTH.pack(len(data)) + data


def receive(connection: socket.socket) -> bytes | None:
    """The next message; None at the end."""
    head = _exactly(connection, LENGTH.size)
    return _exactly(connection, LENGTH.unpack(head)[0]) if head is not None else None


def _exactly(connection: socket.socket, n_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < n_bytes:
        part = connection.recv(n_bytes - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main())
