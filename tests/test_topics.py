import re

import pytest

from coordinator.command.commands import COMMANDS, TOPICS, command_flags
from coordinator.command.topics import TEXTS, topic_text


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_fits_a_screen_and_names_real_flags_only(topic: str) -> None:
    text = topic_text(topic)
    assert text.startswith(f"{topic}: ")
    assert max(len(line) for line in text.splitlines()) <= 100
    assert len(text.splitlines()) <= 40
    ready = {name for _, flag in command_flags(None) if flag.is_ready for name in flag.names}
    assert set(re.findall(r"--[a-z-]+", text)) <= ready
    assert set(re.findall(r"`moe-coord ([a-z]+)", text)) <= set(COMMANDS)


@pytest.mark.parametrize(
    ("topic", "flag"), [("readers", "--reader"), ("policies", "--policy"), ("memory", "--kv-type")]
)
def test_every_choice_of_a_flag_is_explained(topic: str, flag: str) -> None:
    kind = next(found.kind for _, found in command_flags(None) if found.name == flag)
    assert kind is not None
    missing = [name for name in kind.choices if name not in TEXTS[topic] and name != "auto"]
    assert not missing


def test_without_a_topic_all_are_listed() -> None:
    assert all(topic in topic_text(None) for topic in TOPICS)
