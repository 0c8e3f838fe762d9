"""Shell completion scripts, made from the same field table as the command line.

    eval "$(moe-coord completion bash)"            in ~/.bashrc
    eval "$(moe-coord completion zsh)"             in ~/.zshrc, after compinit
    moe-coord completion fish > ~/.config/fish/completions/moe-coord.fish

A script offers sub-commands, flags that are ready, names where a value is one of a few, and files
where it is a path. Positional arguments are offered by their place directly after the sub-command.
"""

from collections.abc import Callable, Mapping

from coordinator.command.commands import COMMANDS, command_flags
from coordinator.command.flags import Flag

MAIN_JOB = "main"


def completion_script(shell: str) -> str:
    """The script for one of `commands.SHELLS`."""
    return SCRIPTS[shell]()


def _tables() -> list[tuple[str, list[Flag], list[Flag]]]:
    """Command name, its flags, its positional arguments; the main job first, as `MAIN_JOB`."""
    tables = []
    for name in (None, *COMMANDS):
        ready = [flag for _, flag in command_flags(name) if flag.is_ready]
        flags = [flag for flag in ready if not flag.is_positional]
        tables.append((name or MAIN_JOB, flags, [flag for flag in ready if flag.is_positional]))
    return tables


def _bash() -> str:
    cases = []
    for command, flags, positional in _tables():
        for flag in flags:
            if flag.kind is not None:
                names = "|".join(f"{command}:{name}" for name in flag.names)
                cases.append(f"    {names}) {_bash_value(flag)}; return ;;")
        for place, flag in enumerate(positional, start=2):
            # only where no flag stands before it
            cases.append(
                f"    {command}:*) [[ $COMP_CWORD == {place} && $current != -* ]] && "
                f"{{ {_bash_value(flag)}; return; }} ;;&"
            )
        words = [name for flag in flags for name in flag.names] + ["--help"]
        words += ["--version"] if command == MAIN_JOB else []
        cases.append(f'    {command}:*) words="{" ".join(words)}" ;;')
    return _BASH.format(
        commands="|".join(COMMANDS), words=" ".join(COMMANDS), cases="\n".join(cases)
    )


def _bash_value(flag: Flag) -> str:
    assert flag.kind is not None
    if flag.kind.is_path:
        return "_moe_coord_files"
    if flag.kind.choices:
        return f'_moe_coord_words "{" ".join(flag.kind.choices)}"'
    return ":"


_BASH = """\
_moe_coord_words() {{ mapfile -t COMPREPLY < <(compgen -W "$1" -- "$current"); }}
_moe_coord_files() {{
  compopt -o filenames 2>/dev/null
  mapfile -t COMPREPLY < <(compgen -f -- "$current")
}}
_moe_coord() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
  local command=main words=""
  COMPREPLY=()
  # --flag=value comes as three words
  if [[ $current == "=" ]]; then current=""
  elif [[ $previous == "=" ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}
  fi
  case ${{COMP_WORDS[1]}} in
    {commands}) (( COMP_CWORD > 1 )) && command=${{COMP_WORDS[1]}} ;;
  esac
  case $command:$previous in
{cases}
  esac
  [[ $command == main && $COMP_CWORD == 1 && $current != -* ]] && words="{words}"
  _moe_coord_words "$words"
}}
complete -F _moe_coord moe-coord
"""


def _zsh() -> str:
    cases = []
    for command, flags, positional in _tables():
        specs = [spec for flag in flags for spec in _zsh_specs(flag)]
        specs += ["'--help[show the flags]'"]
        specs += [f"'{n}:{flag.name}:{_zsh_value(flag)}'" for n, flag in enumerate(positional, 1)]
        if command == MAIN_JOB:
            names = " ".join(_zsh_quote(f"{n}:{text}") for n, (text, _) in COMMANDS.items())
            specs += ["'--version[show the version]'"]
            cases.append(
                f"  *)\n    commands=({names})\n"
                "    if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then\n"
                f"      _describe command commands\n    else\n"
                f"      _arguments {' '.join(specs)}\n    fi ;;"
            )
        else:
            cases.insert(
                0, f"  {command}) shift words; (( CURRENT -= 1 )); _arguments {' '.join(specs)} ;;"
            )
    body = "\n".join(cases)
    return (
        f"#compdef moe-coord\n_moe_coord() {{\n  local -a commands\n  case $words[2] in\n{body}\n"
        '  esac\n}\nif [ "$funcstack[1]" = "_moe_coord" ]; then _moe_coord "$@"\n'
        "else compdef _moe_coord moe-coord; fi\n"
    )


def _zsh_specs(flag: Flag) -> list[str]:
    """One spec per name; a long name also takes its value after ``=``."""
    text = flag.help.replace("[", "(").replace("]", ")").replace(":", ",")
    star = "*" if flag.many else ""
    if flag.kind is None:
        return [_zsh_quote(f"{star}{name}[{text}]") for name in flag.names]
    value = f":{flag.kind.metavar.split('|')[0].lower()}:{_zsh_value(flag)}"
    return [
        _zsh_quote(f"{star}{name}{'=' if name.startswith('--') else ''}[{text}]{value}")
        for name in flag.names
    ]


def _zsh_value(flag: Flag) -> str:
    assert flag.kind is not None
    if flag.kind.is_path:
        return "_files"
    return f"({' '.join(flag.kind.choices)})" if flag.kind.choices else " "


def _zsh_quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish() -> str:
    lines = ["complete -c moe-coord -f"]
    others = " ".join(COMMANDS)
    for command, flags, positional in _tables():
        if command == MAIN_JOB:
            condition = f"not __fish_seen_subcommand_from {others}"
            lines += [
                f"complete -c moe-coord -n __fish_is_first_arg -a {name} -d {_fish_quote(text)}"
                for name, (text, _) in COMMANDS.items()
            ]
        else:
            condition = f"__fish_seen_subcommand_from {command}"
        for flag in flags:
            names = [f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in flag.names]
            parts = [*names, "-d", _fish_quote(flag.help), *_fish_value(flag)]
            lines.append(f"complete -c moe-coord -n '{condition}' {' '.join(parts)}")
        for place, flag in enumerate(positional, start=2):
            here = f"{condition}; and test (count (commandline -opc)) -eq {place}"
            value = " ".join(part for part in _fish_value(flag) if part != "-x")
            lines.append(f"complete -c moe-coord -n '{here}' {value.replace('-r -F', '-F')}")
    return "\n".join(lines) + "\n"


def _fish_value(flag: Flag) -> list[str]:
    if flag.kind is None:
        return []
    if flag.kind.is_path:
        return ["-r -F"]
    if flag.kind.choices:
        return ["-x", "-a", _fish_quote(" ".join(flag.kind.choices))]
    return ["-x"]


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: Mapping[str, Callable[[], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
