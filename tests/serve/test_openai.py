"""The official client against the server: what it sends and what it makes of the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from fake_model import expected_text
from serve_support import Served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_prompt(text: str) -> str:
    """What the fake chat template makes of one message."""
    return f"u:{text}|a:"


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}], max_completion_tokens=5, temperature=0
    )
    (choice,) = answer.choices
    assert choice.message.content == expected_text(chat_prompt("hello"), 5)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(chat_prompt("hello")), 5)


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    """FAILURES 118: one last chunk counts, with empty choices, equal to the whole answer's usage."""
    options = {"model": "fake", "messages": [{"role": "user", "content": "stream"}], "max_tokens": 7, "temperature": 0}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 6 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1


def test_no_usage_chunk_unless_asked_for(client: openai.OpenAI) -> None:
    """FAILURES 118."""
    chunks = list(client.completions.create(model="fake", prompt="x", max_tokens=2, stream=True))
    assert all(len(chunk.choices) == 1 for chunk in chunks)


def test_completions_of_several_prompts_and_answers(client: openai.OpenAI) -> None:
    """FAILURES 125: results come in the order of the prompts."""
    answer = client.completions.create(model="fake", prompt=["ab", "cde", "f"], n=2, max_tokens=3, temperature=0)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert texts == [expected_text(prompt, 3) for prompt in ("ab", "ab", "cde", "cde", "f", "f")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 18)


def test_token_ids_as_a_prompt_and_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=[104, 105], max_tokens=2, temperature=0, echo=True)
    assert answer.choices[0].text == "hi" + expected_text("hi", 2)


def test_several_answers_differ_and_repeat_with_a_seed(client: openai.OpenAI) -> None:
    """FAILURES 89."""
    sets = [
        client.completions.create(model="fake", prompt="seed", n=4, max_tokens=8, temperature=5.0, seed=3)
        for _ in range(2)
    ]
    first, second = ([choice.text for choice in answer.choices] for answer in sets)
    assert first == second
    assert len(set(first)) == 4


def test_a_stop_text_ends_the_answer(client: openai.OpenAI) -> None:
    """FAILURES 117: streaming or not."""
    text = expected_text("abc", 6)
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=6, temperature=0, stop=text[2:4])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[:2], "stop")
    chunks = client.completions.create(
        model="fake", prompt="abc", max_tokens=6, temperature=0, stop=text[2:4], stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[:2]


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "p"}],
        max_tokens=2,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == answer.choices[0].message.content
    for token in logprobs.content:
        assert token.logprob < 0
        assert token.top_logprobs[0].token == token.token
        assert len(token.top_logprobs) == 3


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="p", max_tokens=2, temperature=0, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert [list(top) for top in logprobs.top_logprobs or []] == [[token] for token in logprobs.tokens or []]


def test_logit_bias(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="p", max_tokens=3, temperature=0, logit_bias={"113": 100})
    assert answer.choices[0].text == "qqq"


def test_cached_tokens_are_reported_within_one_salt_only(client: openai.OpenAI) -> None:
    """FAILURES 24."""
    prompt = "a prefix of more than one page of sixteen tokens"

    def cached(salt: str) -> int | None:
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt})
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("one"), cached("two"), cached("one")] == [0, 0, 32]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    """FAILURES 114: the error names the lengths and the limit."""
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(
        openai.BadRequestError, match=r"256 prompt tokens \+ max_tokens 1 = 257 tokens; max_seq_len is 256"
    ):
        client.completions.create(model="fake", prompt="x" * 256, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match=r"temperature must be in \[0, inf\), got -1.0"):
        client.completions.create(model="fake", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(model="fake", prompt="x", best_of=3)
    with pytest.raises(openai.BadRequestError, match="chat template has no place"):
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )


def test_json_modes(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"const": 3}}, "required": ["n"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=40,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
    )
    assert json.loads(answer.choices[0].message.content or "") == {"n": 3}
    loose = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=8,
        temperature=0,
        response_format={"type": "json_object"},
    )
    assert (loose.choices[0].message.content or "").startswith("{")
    with pytest.raises(openai.BadRequestError, match="Invalid type: nope"):
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nope"}}},
        )
