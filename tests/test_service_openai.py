"""The service answers the official openai client, unchanged."""

import json
from collections.abc import Iterator

import openai
import pytest
from running_program import wait_until
from running_service import RunningService

QUESTION = [{"role": "user", "content": "What is the sea?"}]
PROMPT = "In the beginning God created the heaven and"


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService("--io-workers", "1", "--alias", "demo") as run:
        yield run.wait_ready()


@pytest.fixture(scope="module")
def client(service: RunningService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url, api_key="none", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("demo", "model")
    assert client.models.retrieve("demo").id == "demo"


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    options = {"model": "demo", "prompt": PROMPT, "max_tokens": 20, "seed": 7, "temperature": 0.8}
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    timings = chunks[-2].model_dump()["timings"]
    assert timings["predicted_n"] == 20 and 0 <= timings["hit_rate"] <= 1


def test_chat(client: openai.OpenAI) -> None:
    options = {"model": "demo", "messages": QUESTION, "max_completion_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(**options)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_a_turn_may_be_sent_back(client: openai.OpenAI) -> None:
    options = {"model": "demo", "max_tokens": 4, "seed": 1}
    first = client.chat.completions.create(messages=QUESTION, **options)
    messages = [*QUESTION, first.choices[0].message.model_dump(), QUESTION[0]]
    again = client.chat.completions.create(messages=messages, **options)
    assert again.usage is not None and first.usage is not None
    assert again.usage.prompt_tokens > first.usage.prompt_tokens


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 5
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)  # greedy
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None and found.text_offset is not None
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.text_offset[0] == 0 and len(found.top_logprobs or []) == 5


def test_stop_strings(client: openai.OpenAI) -> None:
    options = {"model": "demo", "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[10:13]
    answer = client.completions.create(**options, stop=[stop, "never that"])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens < 30


def test_a_penalty_changes_the_answer(client: openai.OpenAI) -> None:
    options = {"model": "demo", "prompt": "the the the", "max_tokens": 40, "temperature": 0}
    plain = client.completions.create(**options).choices[0].text
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert client.completions.create(**options, **penalty).choices[0].text != plain
    penalty = {"extra_body": {"repeat_penalty": 1.5}}
    assert client.completions.create(**options, **penalty).choices[0].text != plain


@pytest.mark.parametrize(
    ("parameters", "kind", "param"),
    [
        ({"n": 2}, openai.BadRequestError, "n"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"mirostat": 2}}, openai.BadRequestError, "mirostat"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"prompt": ""}, openai.BadRequestError, None),
        ({"prompt": "sea " * 5000}, openai.BadRequestError, "prompt"),
        ({"model": "gpt-5"}, openai.NotFoundError, "model"),
    ],
)
def test_errors(
    client: openai.OpenAI, parameters: dict, kind: type[openai.APIStatusError], param: str | None
) -> None:
    options = {"model": "demo", "prompt": [5], "max_tokens": 1, **parameters}
    if param is None:  # an empty text is a prompt where the model has a first token
        assert client.completions.create(**options).usage.prompt_tokens == 1
        return
    with pytest.raises(kind) as caught:
        client.completions.create(**options)
    assert caught.value.param == param
    assert param in caught.value.message


def test_leaving_a_stream_ends_the_request(client: openai.OpenAI, service: RunningService) -> None:
    before = service.status()["totals"]["requests"]["cancelled"]
    stream = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=900, seed=1, stream=True
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: service.status()["totals"]["requests"]["cancelled"] == before + 1)
    assert service.status()["requests"]["running"] == 0


def test_tokens_and_back(service: RunningService) -> None:
    status, _, body = service.ask("POST", "/tokenize", {"content": "the sea", "with_pieces": True})
    assert status == 200
    assert "".join(token["piece"] for token in body["tokens"]) == "the sea"
    ids = service.ask("POST", "/tokenize", {"content": "the sea"})[2]["tokens"]
    assert ids == [token["id"] for token in body["tokens"]]
    assert service.ask("POST", "/detokenize", {"tokens": ids})[2] == {"content": "the sea"}


def test_status_has_the_declared_parts(service: RunningService) -> None:
    status = service.status()
    parts = {
        "version", "state", "uptime_seconds", "model", "settings", "recent", "totals", "slots",
        "experts", "processes", "memory", "requests",
    }  # fmt: skip
    assert set(status) == parts
    assert status["state"] == "ready"
    names = [process["name"] for process in status["processes"]]
    assert names == ["coordinator", "io0", "compute", "http"]
    experts = status["experts"]
    n_resident = sum(text.count("r") for text in experts["states"])
    assert n_resident == sum(found["ready"] for found in status["slots"])
    assert len(experts["uses"]) == len(experts["layers"]) == status["model"]["n_layers"]
    json.dumps(status, allow_nan=False)
