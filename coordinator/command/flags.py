"""How a flag is declared: as the field of a frozen dataclass, which carries all that is said of it.

The command line, shell completion and the tests read the declarations with `flags_of`, so that a
flag is written down once. This module does not know which flags exist.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coordinator.command.flag_values import Kind

Default = TypeVar("Default")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of the command line. `kind` None: a switch. `many`: it may be repeated.

    A name without a dash is a positional argument. A flag whose feature is not there yet has
    `is_ready` False: it is refused by name and not shown.
    """

    names: tuple[str, ...]
    kind: Kind | None
    help: str
    group: str
    default_text: str
    many: bool = False
    is_ready: bool = True
    is_required: bool = False

    @property
    def is_positional(self) -> bool:
        """Whether it is known by its place."""
        return not self.names[0].startswith("-")

    @property
    def name(self) -> str:
        """The long name, as errors call it."""
        return self.names[-1]


def flag(
    default: Default,
    names: str,
    kind: Kind | None,
    group: str,
    help: str,
    *,
    default_text: str = "",
    many: bool = False,
    is_ready: bool = True,
) -> Default:
    """A dataclass field that is a flag. `names` are separated by spaces, the long one last."""
    text = default_text or ("" if default is None or kind is None else str(default))
    declared = Flag(tuple(names.split()), kind, help, group, text, many, is_ready)
    made: Default = field(default=default, metadata={"flag": declared})
    return made


def required(names: str, kind: Kind, group: str, help: str) -> Any:
    """A dataclass field that is a flag which must be given."""
    declared = Flag(tuple(names.split()), kind, help, group, "", is_required=True)
    return field(metadata={"flag": declared})


def flags_of(command: type) -> Iterator[tuple[str, Flag]]:
    """Field name and flag of every field of a dataclass that is a flag, in order."""
    for item in dataclasses.fields(command):
        if "flag" in item.metadata:
            yield item.name, item.metadata["flag"]


def settings_of(command: Any) -> dict[str, object]:
    """Every setting of an instance by flag name without the dashes, as JSON values."""
    settings: dict[str, object] = {}
    for field_name, declared in flags_of(type(command)):
        value = getattr(command, field_name)
        plain = value if isinstance(value, bool | int | float | str | None) else str(value)
        settings[declared.name.lstrip("-")] = list(value) if isinstance(value, tuple) else plain
    return settings
