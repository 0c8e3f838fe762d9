"""Conversations become prompts: templates of honest and of hostile model files."""

import asyncio
import select
import time
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import CHAT_TEMPLATE, tiny_model
from running_service import RunningService
from tiny_vocabulary import PATH, byte_pair_metadata

from coordinator.api import chat
from coordinator.api.chat import ChatTemplate, read_messages, transcript
from coordinator.api.errors import ApiError
from coordinator.processes.launch import start_renderer
from coordinator.text.tokenizer import build_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hé <|im_end|> {{ 7 * 7 }}"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]


def template_of(text: str | None, **vocabulary: Any) -> ChatTemplate:
    metadata = byte_pair_metadata(**vocabulary)
    if text is not None:
        metadata["tokenizer.chat_template"] = text
    return ChatTemplate(metadata, build_tokenizer(metadata, PATH), start_renderer)


def rendered(template: ChatTemplate) -> str:
    async def ask() -> str:
        try:
            return await template.prompt(MESSAGES)
        finally:
            template.close()

    return asyncio.run(ask())


def test_a_usual_template() -> None:
    text = rendered(template_of(CHAT_TEMPLATE))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHé <|im_end|> {{ 7 * 7 }}<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "system", "content": "Be brief."}, '),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "system"'),
        ("{% for m in messages %}{% break %}{% endfor %}ok", "ok"),
        ("{{ bos_token }}|{{ eos_token }}", "|<|endoftext|>"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools %}no{% else %}yes{% endif %}", "yes"),
        ("  {% if true %}\n  a\n  {% endif %}", "  a\n"),
        ("{{ messages[0].content.strip().upper() }}", "BE BRIEF."),
    ],
)
def test_what_templates_make_use_of(template: str, text: str) -> None:
    last = byte_pair_metadata()["tokenizer.ggml.tokens"].index("<|endoftext|>")
    assert rendered(template_of(template, eos_token_id=last)).startswith(text)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ 'a' * 10**10 }}", ""),
        ("{{ '%999999999d' | format(1) }}", ""),
    ],
)
def test_a_hostile_template_is_an_error_of_the_request(template: str, why: str) -> None:
    started = time.monotonic()
    with pytest.raises(ApiError) as caught:
        rendered(template_of(template))
    assert caught.value.status == 400
    assert caught.value.code == "chat_template_failed"
    assert why in caught.value.message
    assert time.monotonic() - started < 30


def test_the_renderer_comes_back() -> None:
    """One that was killed, and one whose request was cancelled, cost the next request nothing."""
    template = template_of("{{ messages[0].content }}")

    async def ask() -> None:
        assert await template.prompt(MESSAGES) == "Be brief."
        asking = asyncio.create_task(template.prompt(MESSAGES))
        await asyncio.sleep(0)
        asking.cancel()
        assert await template.prompt(MESSAGES) == "Be brief."
        assert await template.prompt(MESSAGES[1:]) == MESSAGES[1]["content"]

    try:
        asyncio.run(ask())
    finally:
        template.close()


def test_a_start_takes_nothing_of_the_time_of_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Python itself may take seconds to come up."""
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.0)
    assert rendered(template_of("{{ messages[0].content }}")) == "Be brief."


def test_no_template() -> None:
    template = template_of(None)
    assert template.warnings and template.stop == ("\nUser:",)
    text = "Be brief.\nUser: a\nAssistant: b\nUser: c\nAssistant:"
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert transcript(messages) == asyncio.run(template.prompt(messages)) == text


def test_a_developer_is_the_system() -> None:
    found = read_messages([{"role": "developer", "content": "x", "tool_calls": []}])
    assert found == [{"role": "system", "content": "x"}]


def test_the_first_token_stands_once() -> None:
    special = (("<s>", 3),)
    first = byte_pair_metadata(special=special)["tokenizer.ggml.tokens"].index("<s>")
    for text, template in (("<s>Hello", "x"), ("Hello", "x"), ("Hello", None)):
        made = template_of(template, special=special, bos_token_id=first, add_bos_token=True)
        tokens = made.encode(text)
        assert tokens.count(first) == 1 and tokens[0] == first


def test_the_service_lives_while_a_template_hangs(tmp_path: Path) -> None:
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    model = tiny_model(tmp_path / "m.gguf", chat_template=template)
    with RunningService("--model", str(model)) as service:
        service.wait_ready()
        stream = service.open_stream("/v1/chat/completions", {"messages": MESSAGES})
        with stream:
            time.sleep(0.3)
            assert service.ask("GET", "/health")[0] == 200
            assert service.complete("Hello", max_tokens=2)
            assert not select.select([stream], [], [], 0)[0]  # it hangs still
            assert stream.recv(65536).startswith(b"HTTP/1.1 400")
