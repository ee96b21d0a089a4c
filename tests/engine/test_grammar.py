"""Answers that follow a JSON schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from fake_model import EOS, FakeModel, byte_tokenizer
from test_engine import greedy, make_engine
from test_parallel_sampling import run

from pagedkv.engine.grammar import Grammars
from pagedkv.engine.params import SamplingParams
from pagedkv.errors import InvalidRequestError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def noisy() -> FakeModel:
    """Any byte may come next, and the end seldom."""

    def fault(_: torch.Tensor, logits: torch.Tensor) -> None:
        logits[:] = 0.0
        logits[:, EOS] = -5.0

    return FakeModel(fault=fault)


def sampled(seed: int, **changes: Any) -> SamplingParams:
    options = {"temperature": 1.0, "seed": seed, "max_tokens": 60, "json_schema": json.dumps(SCHEMA)}
    return SamplingParams(**(options | changes))


@pytest.mark.parametrize("seed", range(8))
def test_a_random_answer_follows_the_schema(seed: int) -> None:
    engine = make_engine(noisy())
    name = engine.add_request("person", sampled(seed))
    (output,) = run(engine)[1][name].outputs
    assert output.finish_reason == "stop"
    person = json.loads(output.text)
    assert person["name"] in ("ada", "bob")
    assert 0 <= person["age"] <= 99


def test_branches_follow_it_independently() -> None:
    engine = make_engine(noisy(), pages=30)
    name = engine.add_request("person", sampled(3, n=4))
    answers = [json.loads(output.text) for output in run(engine)[1][name].outputs]
    assert len(answers) == 4
    assert len({json.dumps(answer) for answer in answers}) > 1


def test_a_greedy_answer_follows_it_too_and_others_beside_it_are_free() -> None:
    engine = make_engine()
    bound = engine.add_request("x", greedy(30, json_schema=json.dumps({"const": 5})))
    free = engine.add_request("hello", greedy(4))
    _, results = run(engine)
    alone = make_engine()
    name = alone.add_request("hello", greedy(4))
    assert json.loads(results[bound].outputs[0].text) == 5
    assert results[free].outputs[0].text == run(alone)[1][name].outputs[0].text


def test_a_preempted_answer_goes_on_where_it_was() -> None:
    engine = make_engine(noisy(), pages=6, max_seq_len=90)
    names = [engine.add_request(f"request {number} of several", sampled(number)) for number in range(4)]
    _, results = run(engine)
    assert all(json.loads(results[name].outputs[0].text) for name in names)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type": "nope"}', "json_schema: Invalid type: nope"),
        ("{", "json_schema: "),
        ("", "1 to 262144 characters, got 0"),
        ("x" * 270_000, "got 270000"),
        (5, "json_schema must be a text, got 5"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(schema: Any, message: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request("x", SamplingParams(json_schema=schema))
    assert not engine.has_unfinished


def test_a_fork_of_a_grammar_goes_its_own_way() -> None:
    state = Grammars(byte_tokenizer(), 300).of_schema('{"enum": ["ab", "ac"]}')
    for byte in b'"a':
        state.record(byte)
    twin = state.fork()
    state.record(ord("b"))
    assert [token for token, good in enumerate(state.allowed()) if good] == [ord('"')]
    assert [token for token, good in enumerate(twin.allowed()) if good] == [ord("b"), ord("c")]
