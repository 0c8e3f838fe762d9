"""A conversation's commands, as scripts."""

import json
from pathlib import Path

import pytest

from coordinator.serving.conversation import COMMANDS, HELP, OUTSIDE, CommandError, Conversation

SAVED = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
]


def talk_of(*texts: str, system: str | None = None) -> Conversation:
    talk = Conversation(system, {"temperature": 0.5, "seed": None})
    for question, answer in zip(texts[::2], texts[1::2], strict=True):
        talk.ask(question)
        talk.answer(answer)
    return talk


def contents(talk: Conversation) -> list[str]:
    return [message["content"] for message in talk.messages]


def test_questions_and_answers() -> None:
    talk = talk_of("one", "two", "three", "four", system="be kind")
    assert contents(talk) == ["be kind", "one", "two", "three", "four"]
    assert [message["role"] for message in talk.messages[:3]] == ["system", "user", "assistant"]
    assert talk.parameters == {"temperature": 0.5}
    talk.ask("five")
    talk.answer("")  # stopped before the first token
    assert contents(talk)[-1] == "four"


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("/clear", []),
        ("/undo", ["one", "two"]),
        ("/system be kind", ["be kind", "one", "two", "three", "four"]),
        ("/system", ["one", "two", "three", "four"]),
        ("/show", ["one", "two", "three", "four"]),
    ],
)
def test_commands(line: str, left: list[str]) -> None:
    talk = talk_of("one", "two", "three", "four")
    assert talk.command(line)
    assert contents(talk) == left


def test_an_answer_is_taken_back_for_another() -> None:
    talk = talk_of("one", "two")
    talk.retry()
    assert contents(talk) == ["one"]
    talk.retry()  # the other one failed
    assert contents(talk) == ["one"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/set temperature 0", {"temperature": 0.0}),
        ("/set max_tokens 20", {"temperature": 0.5, "max_tokens": 20}),
        ("/set temperature -", {}),
        ("/set", {"temperature": 0.5}),
    ],
)
def test_how_answers_are_drawn(line: str, expected: dict[str, float]) -> None:
    talk = talk_of()
    assert "top_p (default)" in talk.command(line)
    assert talk.parameters == expected


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/nope", "/nope: no such command; /help lists them"),
        ("/undo", "/undo: nothing was asked yet"),
        ("/set heat 3", "/set: expected one of temperature, .*, found 'heat'"),
        ("/set temperature 9", "/set temperature: expected a number from 0 to 2, found '9'"),
        ("/set top_p", "/set top_p: expected a number above 0 .*, found ''"),
        ("/save", "/save: expected a file, found none"),
        ("/load /nonexistent/x", "/load: cannot read /nonexistent/x: No such file"),
        ("/save /nonexistent/x", "/save: cannot write /nonexistent/x: No such file"),
    ],
)
def test_refusals(line: str, error: str) -> None:
    with pytest.raises(CommandError, match=error):
        talk_of().command(line)


def test_nothing_to_answer_again() -> None:
    with pytest.raises(CommandError, match="/retry: nothing was asked yet"):
        talk_of().retry()


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    assert talk_of("one", "two", system="be kind").command(f"/save {path}").startswith("3 message")
    assert json.loads(path.read_text()) == SAVED
    talk = talk_of("other", "thing")
    talk.command(f"/load {path}")
    assert talk.messages == SAVED


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]x", "3", '["a"]', '{"role": "user"}', '[{"role": "user"}]',
        '[{"role": "user", "content": 1}]',
        '[{"role": "assistant", "content": "a"}]',
        '[{"role": "user", "content": "a"}, {"role": "user", "content": "a"}]',
        '[{"role": "user", "content": "a", "more": "b"}]',
    ],
)  # fmt: skip
def test_a_file_that_is_no_conversation(tmp_path: Path, text: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(text)
    talk = talk_of("one", "two")
    with pytest.raises(CommandError, match="/load: expected "):
        talk.command(f"/load {path}")
    assert contents(talk) == ["one", "two"]


def test_a_question_without_an_answer_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([*SAVED, {"role": "user", "content": "three"}]))
    talk = talk_of()
    talk.command(f"/load {path}")
    assert talk.messages == SAVED


def test_help_names_every_command() -> None:
    for name in (*COMMANDS, *OUTSIDE):
        assert name == "/help" or f"\n{name}" in f"\n{HELP}"
