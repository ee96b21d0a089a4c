"""Tool calls: the formats of chat templates, what the grammar lets a model write, and what is read back."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_model import byte_tokenizer
from serve_support import serving
from tokenizers import AddedToken

from pagedkv.engine.grammar import Grammars
from pagedkv.errors import InvalidRequestError
from pagedkv.serve.tools import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    CallReader,
    Tool,
    ToolFormat,
    tool_format,
    tool_grammar,
)

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool("weather", CITY)
CLOCK = Tool("clock", {"type": "object", "properties": {}, "additionalProperties": False})
FORMATS = [HERMES, MISTRAL, MISTRAL_ARGS, LLAMA]

TOOL_TEMPLATE = (
    "{% if tools %}T:{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call>|{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}|"
    "{% endfor %}a:"
)


def written(form: ToolFormat, name: str, arguments: str) -> str:
    return f"{form.opening}{name}{form.between}{arguments}{form.closing}"


def allowed(form: ToolFormat, text: str, *, marks: bool, required: bool = False, several: bool = True) -> str:
    """The part of a text that the grammar lets through, and ". " where the answer may end then."""
    tokenizer = byte_tokenizer()
    if marks:
        tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<tool_call>", "[TOOL_CALLS]", "[ARGS]")])
    grammar = tool_grammar(form, [WEATHER, CLOCK], tokenizer.get_added_vocab(), required=required, several=several)
    state = Grammars(tokenizer, len(tokenizer)).of_lark(grammar)
    passed: list[int] = []
    for token in tokenizer(text)["input_ids"]:
        if not state.allowed()[token]:
            return str(tokenizer.decode(passed))
        state.record(token)
        passed.append(token)
    return str(tokenizer.decode(passed)) + ("." if state.allowed()[tokenizer.eos_token_id] else "")


@pytest.mark.parametrize("marks", [False, True], ids=["letters", "tokens"])
@pytest.mark.parametrize("form", FORMATS, ids=["hermes", "mistral", "mistral-args", "llama"])
def test_a_begun_call_can_only_be_a_right_one(form: ToolFormat, marks: bool) -> None:
    good = "Well. " + written(form, "weather", '{"city": "Oslo"}')
    assert allowed(form, good, marks=marks) == good + "."
    assert allowed(form, "no call", marks=marks) == "no call."
    start = "Well. " + form.opening
    assert allowed(form, start + "nothing", marks=marks) == start
    half = start + "weather" + form.between + '{"city": "'
    assert allowed(form, half + "Paris", marks=marks) == half


@pytest.mark.parametrize("form", FORMATS, ids=["hermes", "mistral", "mistral-args", "llama"])
def test_a_required_call_comes_at_once_and_one_is_one(form: ToolFormat) -> None:
    call = written(form, "clock", "{}")
    assert allowed(form, "Well", marks=False, required=True) == ""
    assert allowed(form, f"{call}\n{call}", marks=False, required=True) == f"{call}\n{call}."
    assert allowed(form, f"{call}\n", marks=False, required=True, several=False) == call


def read(text: str, form: ToolFormat | None, cuts: list[int]) -> tuple[str, list[tuple[str, Any]]]:
    reader = CallReader(form)
    shown, calls = "", []
    edges = [0, *sorted(cuts), len(text)]
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        part, made = reader.feed(text[start:end], last=number == len(edges) - 2)
        shown += part
        calls += [(call.name, json.loads(call.arguments)) for call in made]
    return shown, calls


@pytest.mark.parametrize("form", FORMATS, ids=["hermes", "mistral", "mistral-args", "llama"])
def test_calls_are_read_the_same_however_the_text_is_cut(form: ToolFormat) -> None:
    one, two = written(form, "weather", '{"city": "Oslo"}'), written(form, "clock", "{}")
    rng = random.Random(0)
    for text, shown, calls in (
        (f"Well.\n{one}", "Well.", [("weather", {"city": "Oslo"})]),
        (f"{one}\n{two}", "", [("weather", {"city": "Oslo"}), ("clock", {})]),
        ("a < b, {x} [1]  ", "a < b, {x} [1]  ", []),
        (f"cut {one[:-3] if form.closing else one[:-1]}", f"cut {one[:-3] if form.closing else one[:-1]}", []),
    ):
        for _ in range(30):
            cuts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(8))]
            assert read(text, form, cuts) == (shown, calls)


def test_without_tools_a_call_is_text() -> None:
    text = written(HERMES, "clock", "{}")
    assert read(text, None, [3]) == (text, [])


def test_formats_are_told_by_the_template() -> None:
    assert tool_format(None) is None
    assert tool_format("{{ messages }}<tool_call>") is None
    assert tool_format("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert tool_format("{% if tools %}<tool_call><function=x>{% endif %}") is None
    assert tool_format("{% if tools %}[TOOL_CALLS]{% endif %}") is MISTRAL
    assert tool_format("{% if tools %}[TOOL_CALLS] [ARGS]{% endif %}") is MISTRAL_ARGS
    assert tool_format("""{% if tools %}{"name": "f", "parameters": {}}{% endif %}""") is LLAMA


def test_a_schema_that_cannot_be_enforced_is_refused() -> None:
    tokenizer = byte_tokenizer()
    grammar = tool_grammar(HERMES, [Tool("f", {"type": "nope"})], {}, required=True, several=True)
    with pytest.raises(InvalidRequestError, match="nope"):
        Grammars(tokenizer, len(tokenizer)).of_lark(grammar)


# Against a server, with the official client.

TOOLS: Any = [
    {"type": "function", "function": {"name": tool.name, "description": "?", "parameters": tool.parameters}}
    for tool in (WEATHER, CLOCK)
]
ASK: Any = [{"role": "user", "content": "Oslo?"}]


@pytest.fixture(scope="module")
def tools_client(_import_path: None) -> Iterator[openai.OpenAI]:
    with (
        serving(chat_template=TOOL_TEMPLATE) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": "fake", "messages": ASK, "tools": TOOLS, "max_tokens": 100, "temperature": 0}
    return client.chat.completions.create(**(defaults | options))


def test_a_named_tool_is_called(tools_client: openai.OpenAI) -> None:
    answer = ask(tools_client, tool_choice={"type": "function", "function": {"name": "weather"}})
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")

    later = [*ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert ask(tools_client, messages=later, tool_choice="none", max_tokens=3).choices[0].finish_reason == "length"


def test_a_required_call_streams_as_the_whole_one(tools_client: openai.OpenAI) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = ask(tools_client, **options).choices[0].message.tool_calls
    chunks = list(ask(tools_client, **options, stream=True))
    made = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in made] == [
        (0, whole.function.name, whole.function.arguments)
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == ""


def test_a_free_answer_with_tools_is_text(tools_client: openai.OpenAI) -> None:
    (choice,) = ask(tools_client, max_tokens=5).choices
    assert (choice.finish_reason, len(choice.message.content), choice.message.tool_calls) == ("length", 5, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "not among the tools"),
        ({"tools": None, "tool_choice": "required"}, "there are no tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "two tools have one name"),
        ({"response_format": {"type": "json_object"}}, "together"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "no content"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "pattern"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}]}, "nope"),
    ],
)
def test_what_is_wrong_with_tools_is_said(tools_client: openai.OpenAI, options: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(tools_client, **options)
