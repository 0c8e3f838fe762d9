"""A conversation in the terminal: what was said, how answers are drawn, and the /commands.

Pure but for `/save` and `/load`. Does not know how an answer is had or text is shown.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coordinator.command.flag_values import SEED, Kind, integer, real

SETTINGS: Mapping[str, Kind] = {
    "temperature": real(0, 2),
    "top_p": real(0, 1, above_low=True),
    "top_k": integer(0, 2**31 - 1),
    "min_p": real(0, 1),
    "max_tokens": integer(1, 2**31 - 1),
    "seed": SEED,
}
HELP = """\
/clear             begin anew
/undo              take back the last question and its answer
/retry             answer the last question again
/system TEXT       tell the model this before everything; without TEXT: nothing
/set               show how answers are drawn
/set NAME VALUE    change it: temperature, top_p, top_k, min_p, max_tokens, seed; - is the default
/show              print the conversation
/save FILE         write the conversation as JSON
/load FILE         go on with one that was saved
/status            what the service does
/quit              end (also Ctrl-D)
A line that ends with \\ goes on in the next. \"\"\" alone on a line begins and ends a longer text.
Ctrl-C stops an answer."""
ROLES = ("system", "user", "assistant")
MAX_FILE_BYTES = 64 * 1024 * 1024


class CommandError(Exception):
    """A command cannot be done: one line."""


class Conversation:
    """What was said so far, and the parameters of the next answer."""

    def __init__(self, system: str | None, parameters: Mapping[str, Any]) -> None:
        self.system = system
        self.parameters = {name: value for name, value in parameters.items() if value is not None}
        self.turns: list[dict[str, str]] = []  # of user and assistant, in turn

    @property
    def messages(self) -> list[dict[str, str]]:
        """As the service takes them."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def ask(self, text: str) -> None:
        """The user says something."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """The model said something; an answer of nothing takes the question back."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def retry(self) -> None:
        """Take back the last answer; raises `CommandError`."""
        if not self.turns:
            raise CommandError("/retry: nothing was asked yet")
        if self.turns[-1]["role"] == "assistant":
            self.turns.pop()

    def command(self, line: str) -> str:
        """Do what a line that begins with / says; returns what to print. Raises `CommandError`."""
        name, _, rest = line.partition(" ")
        do = COMMANDS.get(name)
        if do is None:
            raise CommandError(f"{name:.40}: no such command; /help lists them")
        return do(self, rest.strip())


def _clear(talk: Conversation, _: str) -> str:
    talk.turns.clear()
    return "begun anew"


def _undo(talk: Conversation, _: str) -> str:
    if not talk.turns:
        raise CommandError("/undo: nothing was asked yet")
    while talk.turns and talk.turns.pop()["role"] != "user":
        pass
    return f"taken back; {len(talk.turns) // 2} question(s) before"


def _system(talk: Conversation, text: str) -> str:
    talk.system = text or None
    return f"system: {text}" if text else "no system message"


def _set(talk: Conversation, text: str) -> str:
    if text:
        name, _, value = text.partition(" ")
        kind = SETTINGS.get(name)
        if kind is None:
            raise CommandError(f"/set: expected one of {', '.join(SETTINGS)}, found {name!a:.40}")
        if value.strip() == "-":
            talk.parameters.pop(name, None)
        else:
            try:
                talk.parameters[name] = kind.parse(value.strip())
            except ValueError:
                raise CommandError(
                    f"/set {name}: expected {kind.expected}, found {value!a:.40}"
                ) from None
    return ", ".join(f"{name} {talk.parameters.get(name, '(default)')}" for name in SETTINGS)


def _show(talk: Conversation, _: str) -> str:
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in talk.messages) or "(empty)"


def _save(talk: Conversation, name: str) -> str:
    path = _path("/save", name)
    try:
        path.write_text(json.dumps(talk.messages, ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise CommandError(f"/save: cannot write {path}: {error.strerror}") from error
    return f"{len(talk.messages)} message(s) in {path}"


def _load(talk: Conversation, name: str) -> str:
    path = _path("/load", name)
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_FILE_BYTES))
    except OSError as error:
        raise CommandError(f"/load: cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise CommandError(f"/load: expected JSON as /save writes it in {path}") from None
    talk.system, talk.turns = _read(found, path)
    return f"{len(talk.messages)} message(s) from {path}"


def _read(found: Any, path: Path) -> tuple[str | None, list[dict[str, str]]]:
    """System message and turns; a question without an answer at the end is left out."""
    is_list = isinstance(found, list) and all(
        isinstance(item, dict) and item.keys() == {"role", "content"} for item in found
    )
    if not is_list or any(type(text) is not str for item in found for text in item.values()):
        raise CommandError(f"/load: expected a list of messages with role and content in {path}")
    system = found.pop(0)["content"] if found and found[0]["role"] == "system" else None
    if found and found[-1]["role"] == "user":
        found.pop()
    if [item["role"] for item in found] != ["user", "assistant"] * (len(found) // 2):
        raise CommandError(f"/load: expected questions and answers in turn in {path}")
    return system, found


def _path(command: str, name: str) -> Path:
    if not name:
        raise CommandError(f"{command}: expected a file, found none")
    return Path(name).expanduser()


COMMANDS: Mapping[str, Callable[[Conversation, str], str]] = {
    "/help": lambda _, __: HELP,
    "/clear": _clear,
    "/undo": _undo,
    "/system": _system,
    "/set": _set,
    "/show": _show,
    "/save": _save,
    "/load": _load,
}
OUTSIDE = ("/retry", "/status", "/quit")  # done where answers are had
