"""Which keys the service takes, without a service."""

from pathlib import Path

import pytest

from coordinator.command.config import Config
from coordinator.command.flag_values import ConfigError
from coordinator.serving.service_socket import api_keys


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert api_keys(Config()) == ()
    assert api_keys(Config(api_key="a+b/c=")) == ("a+b/c=",)
    assert api_keys(Config(api_key=str(file))) == ("one", "two")


def test_a_file_that_is_not_there_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found no file .*missing; a key that looks like a path"):
        api_keys(Config(api_key=str(tmp_path / "missing")))


def test_a_file_without_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="expected a key a line"):
        api_keys(Config(api_key=str(file)))
