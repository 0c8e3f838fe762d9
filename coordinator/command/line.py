"""From what the user typed to a checked `Config` or the dataclass of a sub-command.

`parse` is a function of its arguments and the usable cores: it opens nothing, and a wrong setting
is refused here, before anything else happens. Every refusal is a `ConfigError` with one line; only
`--help` and `--version` end the process, as argparse does it.
"""

import argparse
import dataclasses
import difflib
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, NoReturn

from coordinator.command.bench_commands import CappedCommand
from coordinator.command.client_commands import ChatArguments, ChatCommand
from coordinator.command.combinations import PROMPTS, combined, flag_name
from coordinator.command.commands import (
    COMMANDS,
    Command,
    CompletionCommand,
    EvalCommand,
    HelpCommand,
    MapCommand,
    PlanArguments,
    PlanCommand,
    SynthCommand,
    command_flags,
)
from coordinator.command.config import Config
from coordinator.command.cores import usable_cores
from coordinator.command.flag_values import ConfigError, parse_value
from coordinator.command.flags import Flag

__all__ = [
    "Command",
    "CompletionCommand",
    "ConfigError",
    "EvalCommand",
    "HelpCommand",
    "MapCommand",
    "SynthCommand",
    "parse",
    "prompt_text",
    "version",
]

PROGRAM = "moe-coord"
MAX_PROMPT_BYTES = 16 * 1024 * 1024  # some four million tokens: more than any context
DESCRIPTION = """Run a mixture-of-experts model whose experts do not fit in memory.
With -p, -f or --tokens it prints the answer and stops; without, it stays up."""
USAGES = {  # where argparse's own would not say it
    None: f"{PROGRAM} [flags]\n       {PROGRAM} COMMAND …",
    "capped": f"{PROGRAM} capped [flags] -- COMMAND …",
}
MISSING = "the following arguments are required: "


def version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def parse(arguments: Sequence[str], cores: Sequence[int] | None = None) -> Command:
    """What the command line asks for; `cores` are the usable ones, None: of this process.

    Raises `ConfigError`; `--help` and `--version` print and raise `SystemExit` (0).
    """
    cores = usable_cores() if cores is None else cores
    if not arguments or arguments[0].startswith("-"):
        values = _values(None, arguments)
        return combined(Config(**values), frozenset(values), cores)
    name, *rest = arguments
    if name not in COMMANDS:
        raise ConfigError(
            f"{PROGRAM}: expected a command ({', '.join(COMMANDS)}) or a flag, found "
            f"{_shown(name)}; {_nearest(name, COMMANDS) or f'see {PROGRAM} --help'}"
        )
    if name == "capped":
        return _capped(rest)
    values = _values(name, rest)
    if name == "eval":
        out = values.pop("out")
        given = frozenset(values)
        config = Config(**{"numerics": "exact", **values})
        return EvalCommand(combined(config, given, cores), out)
    if name == "calibrate":
        return _calibrate(values, cores)
    if name == "plan":
        return _plan(values, cores)
    if name == "chat":
        return _chat(values, cores)
    command: Command = COMMANDS[name][1](**values)
    return command


def _calibrate(values: dict[str, Any], cores: Sequence[int]) -> Config:
    """The main job over a given text, its uses counted and saved."""
    if not set(PROMPTS) & set(values):
        raise ConfigError(
            f"{PROGRAM} calibrate: expected a text, found none; give -p TEXT, -f FILE or --tokens"
        )
    config = Config(**{"usage": values.pop("out"), **values})
    return combined(config, frozenset(values) | {"usage"}, cores)


def _plan(values: dict[str, Any], cores: Sequence[int]) -> PlanCommand:
    """What the engine would be told, and what to measure."""
    names = {field.name for field in dataclasses.fields(PlanArguments)} - {"model"}
    own = PlanArguments(**{name: values.pop(name) for name in names & set(values)})
    config = combined(Config(**values), frozenset(values), cores)
    return PlanCommand(config, own.n_prompt, own.n_answer, own.probe_seconds, own.routing, own.json)


def _chat(values: dict[str, Any], cores: Sequence[int]) -> ChatCommand:
    """A running service, or settings for one of its own."""
    names = {field.name for field in dataclasses.fields(ChatArguments)}
    own = ChatArguments(**{name: values.pop(name) for name in names & set(values)})
    given = frozenset(values)
    if own.url is None:
        return ChatCommand(own, (combined(Config(**values), given, cores), given))
    if given:
        raise ConfigError(
            f"{flag_name(min(given))}: expected no setting of the engine with --url, found it; the "
            "service has its own: drop one of them"
        )
    return ChatCommand(own, None)


def prompt_text(config: Config, standard_input: BinaryIO) -> str | None:
    """The text of `-p`, `-p -` or `-f`; None where none of them was given.

    One line end at the end of a file or of standard input is dropped. Raises `ConfigError`.
    """
    try:
        if config.prompt_file is not None:
            flag = "--file"
            with config.prompt_file.open("rb") as file:
                data = file.read(MAX_PROMPT_BYTES + 1)
        elif config.prompt == "-":
            flag = "--prompt -"
            data = standard_input.read(MAX_PROMPT_BYTES + 1)
        else:
            return config.prompt
    except OSError as error:
        raise ConfigError(
            f"--file: expected a readable file, found {_shown(str(config.prompt_file))}: "
            f"{error.strerror}; give another path"
        ) from error
    if len(data) > MAX_PROMPT_BYTES:
        raise ConfigError(
            f"{flag}: expected at most {MAX_PROMPT_BYTES} bytes, found more; use a shorter text"
        )
    try:
        text = data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{flag}: expected UTF-8 text, found byte {data[error.start]:#04x} at {error.start}; "
            "convert the text to UTF-8"
        ) from error
    if not text:
        raise ConfigError(f"{flag}: expected some text, found none; give a prompt")
    return text


def _capped(arguments: Sequence[str]) -> CappedCommand:
    """What stands behind ``--`` is not ours to read."""
    n_ours = arguments.index("--") if "--" in arguments else len(arguments)
    inner = tuple(arguments[n_ours + 1 :])
    if not inner and not {"-h", "--help"} & set(arguments):
        raise ConfigError(
            f"{PROGRAM} capped: expected -- and a command, found none; write "
            f"{PROGRAM} capped -m 1200M -- COMMAND ..."
        )
    return CappedCommand(inner, **_values("capped", arguments[:n_ours]))


class _Parser(argparse.ArgumentParser):
    """argparse that reports a mistake as `ConfigError` instead of a usage text and exit."""

    def error(self, message: str) -> NoReturn:
        match = re.fullmatch(r"argument ([^:]*): (.*)", message, re.DOTALL)
        text = message
        if message.startswith(MISSING):
            text = f"{self.prog}: expected {message.removeprefix(MISSING)} too, found none"
        elif match is not None:
            text = f"{match[1].split('/')[-1]}: {match[2]}"
            ignored = re.fullmatch(r"ignored explicit argument (.*)", match[2], re.DOTALL)
            if ignored is not None:
                text = f"{match[1]}: expected no value, found {ignored[1]:.60}"
            elif match[2].startswith("expected one argument"):
                text += ", found none (a value that begins with - is written --flag=VALUE)"
        raise ConfigError(f"{text}; see {self.prog} --help")


def _values(command: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Values by field name of the flags that were typed."""
    flags = command_flags(command)
    parser = _parser(command, flags)
    found, extras = parser.parse_known_args(arguments)
    if extras:
        raise _unexpected(parser.prog, extras[0], flags)
    # an optional positional that was not typed is None
    typed = {name: value for name, value in vars(found).items() if value is not None}
    many = {name for name, flag in flags if flag.many}
    return {name: tuple(value) if name in many else value for name, value in typed.items()}


def _unexpected(program: str, extra: str, flags: Iterable[tuple[str, Flag]]) -> ConfigError:
    name = extra.split("=")[0]
    if not name.startswith("-") or name == "--":
        advice = "a prompt is given with -p, a command comes first; " if program == PROGRAM else ""
        return ConfigError(
            f"{program}: expected no further argument, found {_shown(extra)}; {advice}see "
            f"{program} --help"
        )
    known = [text for _, flag in flags if flag.is_ready for text in flag.names]
    advice = _nearest(name, [*known, "--help", "--version"]) or f"see {program} --help"
    return ConfigError(f"{program}: expected a known flag, found {_shown(name)}; {advice}")


def _nearest(name: str, known: Iterable[str]) -> str:
    """What was probably meant, as advice; empty if nothing is near."""
    matches = difflib.get_close_matches(name[:60].replace("_", "-"), list(known), n=1)
    return f"did you mean {matches[0]}?" if matches else ""


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")


def _parser(command: str | None, flags: Sequence[tuple[str, Flag]]) -> _Parser:
    parser = _Parser(
        prog=PROGRAM if command is None else f"{PROGRAM} {command}",
        usage=USAGES.get(command),
        description=DESCRIPTION if command is None else COMMANDS[command][0],
        epilog=_command_list() if command is None else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    if command is None:
        parser.add_argument("--version", action="version", version=f"{PROGRAM} {version()}")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field_name, flag in flags:
        if flag.group not in groups and flag.is_ready:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups.get(flag.group, parser), field_name, flag)
    return parser


def _add(group: argparse._ActionsContainer, field_name: str, flag: Flag) -> None:
    """Declare one flag to argparse."""
    help = flag.help + (f" (default: {flag.default_text})" if flag.default_text else "")
    settings: dict[str, Any] = {"help": help.replace("%", "%%")}
    if not flag.is_ready:
        settings["help"] = argparse.SUPPRESS
    if flag.kind is None:
        group.add_argument(*flag.names, dest=field_name, action="store_true", **settings)
        return
    settings |= {"type": _converter(flag), "metavar": flag.kind.metavar}
    if flag.is_positional:
        optional = {} if flag.is_required else {"nargs": "*" if flag.many else "?", "default": None}
        group.add_argument(field_name, **settings | {"metavar": flag.name} | optional)
        return
    if flag.many:
        settings["action"] = "append"
    group.add_argument(*flag.names, dest=field_name, required=flag.is_required, **settings)


def _converter(flag: Flag) -> Callable[[str], Any]:
    kind = flag.kind
    assert kind is not None
    advice = f"see {PROGRAM} --help"
    if flag.default_text:
        advice = f"leave it out for the default ({flag.default_text})"

    def convert(text: str) -> Any:
        if not flag.is_ready:
            raise ConfigError(
                f"{flag.name}: expected no such flag in version {version()}, found it; drop it"
            )
        return parse_value(flag.name, kind, text, _nearest(text, kind.choices) or advice)

    return convert


def _command_list() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (summary, _) in COMMANDS.items()]
    return "commands:\n" + "\n".join(lines)
