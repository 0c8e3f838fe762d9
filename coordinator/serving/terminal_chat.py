"""`moe-coord chat`: talk with the model in the terminal, over a running service or one of its own.

Answers go to standard output, all else to standard error.
"""

import contextlib
import sys
from collections.abc import Callable, Collection
from typing import Any

from coordinator.command.client_commands import ChatCommand
from coordinator.command.config import Config
from coordinator.command.flags import flags_of
from coordinator.command.streams import write_output
from coordinator.command.terminal import Terminal
from coordinator.serving.conversation import COMMANDS, OUTSIDE, CommandError, Conversation
from coordinator.serving.service_client import (
    Finished,
    ServiceClient,
    ServiceError,
    Text,
    Waiting,
    key_of,
)
from coordinator.serving.service_process import service_process
from coordinator.serving.top_view import one_line
from coordinator.serving.typed_lines import default_history, read_message, remembered

STOP_SECONDS = 10.0
PROMPT = "> "
CONTEXT_IS_FULL = "context_length_exceeded"


def run_chat(command: ChatCommand) -> int:
    """The conversation, until its end. Raises `ServiceError`, `EngineError`."""
    given = command.arguments
    with Terminal() as terminal, contextlib.ExitStack() as stack:
        url = given.url
        if command.engine is not None:
            own = service_process(
                service_arguments(*command.engine), _say_until_ready(terminal), STOP_SECONDS
            )
            url, _ = stack.enter_context(own)
        assert url is not None
        client = ServiceClient(url, key_of(given.api_key))
        status = client.status()  # a wrong address or key is told before anything is typed
        drawing = ("max_tokens", "temperature", "top_p", "seed")
        talk = Conversation(given.system, {name: getattr(given, name) for name in drawing})
        names = (*COMMANDS, *OUTSIDE)
        trouble = stack.enter_context(remembered(given.history or default_history(), names))
        if trouble is not None:
            terminal.warning(trouble)
        terminal.line(f"{status['model']['name']} at {url}; /help lists the commands")
        _talk(client, talk, terminal)
    return 0


def _talk(client: ServiceClient, talk: Conversation, terminal: Terminal) -> None:
    while True:
        try:
            line = read_message(PROMPT)
        except KeyboardInterrupt:  # what was typed is dropped
            sys.stderr.write("\n")
            continue
        if line is None or line.strip() == "/quit":
            return
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                _command(line.strip(), client, talk, terminal)
            else:
                talk.ask(line)
                _answer(client, talk, terminal)
        except CommandError as error:
            terminal.warning(str(error))
        except ServiceError as error:
            advice = "; /undo or /clear makes room" if error.code == CONTEXT_IS_FULL else ""
            terminal.warning(f"{error}{advice}")


def _command(line: str, client: ServiceClient, talk: Conversation, terminal: Terminal) -> None:
    if line == "/status":
        terminal.line(one_line(client.status()))
    elif line == "/retry":
        talk.retry()
        _answer(client, talk, terminal)
    else:
        terminal.line(printable(talk.command(line)))


def _answer(client: ServiceClient, talk: Conversation, terminal: Terminal) -> None:
    """Have the last question answered, and print it as it comes; Ctrl-C stops it."""
    text, finished = "", None
    try:
        with contextlib.closing(client.chat(talk.messages, talk.parameters)) as events:
            for event in events:
                match event:
                    case Waiting(done, total):
                        terminal.progress("prompt", done, total)
                    case Text(piece):
                        terminal.end_progress()
                        text += piece
                        write_output(printable(piece))
                    case Finished():
                        finished = event
    except KeyboardInterrupt:
        terminal.end_progress()
    except ServiceError:
        terminal.end_progress()
        talk.answer(text)
        raise
    talk.answer(text)
    write_output("\n")
    terminal.line(summary(finished))


def summary(finished: Finished | None) -> str:
    """What an answer cost, in one line."""
    if finished is None:
        return "(stopped)"
    found: dict[str, Any] = dict(finished.timings)
    parts = [f"{found.get('predicted_n', 0)} tokens"]
    if found.get("predicted_per_second"):
        parts.append(f"{found['predicted_per_second']:.1f} tokens/s")
    if found.get("prompt_n") is not None:
        seconds = found.get("prompt_ms", 0.0) / 1e3
        parts.append(f"prompt of {found['prompt_n']} in {seconds:.2f} s")
        if found.get("cache_n"):
            parts[-1] += f" ({found['cache_n']} known)"
    if found.get("hit_rate") is not None:
        parts.append(f"hit rate {100 * found['hit_rate']:.1f} %")
    if finished.reason == "length":
        parts.append("cut short: the context is full, or --max-tokens reached (/set max_tokens)")
    return f"({', '.join(parts)})"


def printable(text: str) -> str:
    """Without what a terminal would obey: models repeat what they were trained on."""
    return "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)


# A service of its own


def _say_until_ready(terminal: Terminal) -> Callable[[str, bool], None]:
    """Later lines would stand in the middle of an answer."""

    def say(line: str, is_starting: bool) -> None:
        if is_starting:
            terminal.line(printable(line))

    return say


def service_arguments(config: Config, given: Collection[str]) -> list[str]:
    """The command line of a service with these settings: those that were given, one at a time."""
    arguments = ["--parallel=1"]
    for name, flag in flags_of(Config):
        value = getattr(config, name)
        if name not in given or value is None or value is False:
            continue
        if value is True:
            arguments.append(flag.name)
        else:
            values = value if flag.many else (value,)
            arguments += [f"{flag.name}={item}" for item in values]
    return arguments
