"""Puts the file of a model that was given by name into a command, before anything else is done."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from coordinator.command.bench_commands import BenchCommand, CeilingCommand
from coordinator.command.client_commands import ChatCommand
from coordinator.command.commands import (
    Command,
    EvalCommand,
    MapCommand,
    PackCommand,
    PlanCommand,
    VerifyCommand,
)
from coordinator.command.config import Config
from coordinator.command.flag_values import ConfigError
from coordinator.models.names import HubName, OllamaName, advice, find_cached, parse_name


def located(command: Command, typed: Sequence[str]) -> Command:
    """The command with the path of the model it names.

    A model of Hugging Face that is not here is fetched by another program, which this process
    becomes; that one comes back with the path. Raises `ConfigError`.
    """
    match command:
        case Config():
            return _located_config(command, typed)
        case EvalCommand() | PlanCommand():
            return dataclasses.replace(command, config=_located_config(command.config, typed))
        case ChatCommand(engine=(config, given)):
            found = _located_config(config, typed)
            more = {"aliases"} if found.aliases != config.aliases else set()
            return dataclasses.replace(command, engine=(found, given | more))
        case BenchCommand() if not command.merge:
            files = [_find(file, None, typed)[0] for file in command.files]
            return dataclasses.replace(command, files=tuple(files))
        case MapCommand() | PackCommand() | VerifyCommand() | CeilingCommand():
            path, _ = _find(command.model, None, typed)
            return dataclasses.replace(command, model=path)
    return command


def _located_config(config: Config, typed: Sequence[str]) -> Config:
    path, alias = _find(config.model, config.model_cache, typed)
    aliases = config.aliases if alias is None else (*config.aliases, alias)
    return dataclasses.replace(config, model=path, aliases=aliases)


def _find(model: Path, folder: Path | None, typed: Sequence[str]) -> tuple[Path, str | None]:
    """The file, and how the API calls it where the file's own name says nothing."""
    name = parse_name(str(model))
    if name is None:
        return model, None
    path = find_cached(name, folder)
    if path is None and isinstance(name, HubName):
        _become_fetching(str(model), folder, typed)
    if path is None:
        assert isinstance(name, OllamaName)
        raise ConfigError(
            f"{name}: expected a model that Ollama has on this machine, found none; "
            f"`ollama pull {name.shown}`, or give its folder with --model-cache"
            f"{advice(name, folder)}"
        )
    return path, name.shown if isinstance(name, OllamaName) else None


def _become_fetching(name: str, folder: Path | None, typed: Sequence[str]) -> NoReturn:
    place = "-" if folder is None else str(folder)
    command = [sys.executable, "-P", "-m", "coordinator.fetch_model", name, place, *typed]
    os.execv(sys.executable, command)
