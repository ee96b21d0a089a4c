"""Several answers to one prompt, log-probabilities, and bias."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fake_model import VOCAB, FakeModel, expected_text
from test_engine import greedy, make_engine

from pagedkv.cache import check
from pagedkv.engine import engine as engine_module
from pagedkv.engine.engine import Engine
from pagedkv.engine.outputs import RequestOutput, StepOutput
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.request import FinishReason
from pagedkv.errors import InvalidRequestError

PROMPT = "abcdefghijklmnopqrstuvwxyz"  # a page of 16, and 10 tokens of the next


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": 7, "max_tokens": 6, "n": 4} | changes))


def flat() -> FakeModel:
    """All lower-case letters are about equally likely, so that samples differ."""

    def fault(_: torch.Tensor, logits: torch.Tensor) -> None:
        logits[:] = -30.0
        logits[:, 97:123] = 0.0

    return FakeModel(fault=fault)


def run(engine: Engine) -> tuple[list[StepOutput], dict[str, RequestOutput]]:
    """Step to the end, audited; all pieces, and results by id."""
    pieces: list[StepOutput] = []
    while engine.has_unfinished:
        pieces += engine.step()
        check(engine.manager)
    assert engine.manager.usage().used == 0
    return pieces, {piece.request_id: piece.result for piece in pieces if piece.result is not None}


def texts(result: RequestOutput) -> list[str]:
    return [output.text for output in result.outputs]


def test_answers_differ_and_the_set_repeats_with_the_seed() -> None:
    """FAILURES 89: samples of one seed differ from each other; the same seed gives the same set."""
    sets = []
    for _ in range(2):
        engine = make_engine(flat(), pages=20)
        name = engine.add_request(PROMPT, sampled())
        sets.append(texts(run(engine)[1][name]))
    assert sets[0] == sets[1]
    assert len(set(sets[0])) == 4


def test_the_prompt_is_computed_once_and_its_pages_are_shared() -> None:
    engine = make_engine(flat(), pages=20)
    engine.add_request(PROMPT, sampled(n=3))
    engine.step()
    check(engine.manager)
    assert engine.manager.usage().used == 2, "two pages for three answers"
    engine.step()
    assert engine.manager.usage().used == 4, "each has a last page of its own, one of them the old one"
    run(engine)
    assert engine.stats().computed_tokens == len(PROMPT) + 3 * 5
    assert engine.stats().cached_tokens == 0


@pytest.mark.parametrize("settings", [{"max_batch_size": 2}, {"pages": 3}, {"pages": 4, "max_batch_size": 3}])
def test_answers_are_the_same_where_there_is_no_room_to_share(settings: dict[str, Any]) -> None:
    """They wait their turn, and are the same tokens then: their generators do not know the difference."""
    roomy = make_engine(flat(), pages=40)
    expected = texts(run_one(roomy, sampled(max_tokens=12)))
    tight = make_engine(flat(), max_seq_len=48, **settings)
    assert texts(run_one(tight, sampled(max_tokens=12))) == expected


def run_one(engine: Engine, params: SamplingParams) -> RequestOutput:
    name = engine.add_request(PROMPT, params)
    return run(engine)[1][name]


def test_an_answer_that_ends_does_not_end_the_others() -> None:
    """FAILURES 89: answer 0 stops first; all streams are complete and equal the whole."""
    engine = make_engine(flat(), pages=20)
    whole = run_one(make_engine(flat(), pages=20), sampled())
    stop = whole.outputs[0].text[1]
    name = engine.add_request(PROMPT, sampled(stop=stop))
    pieces, results = run(engine)
    for output, uncut in zip(results[name].outputs, texts(whole), strict=True):
        assert output.text == uncut.split(stop)[0]
        assert "".join(piece.text for piece in pieces if piece.index == output.index) == output.text
        ended = [piece.output for piece in pieces if piece.index == output.index and piece.output is not None]
        assert ended == [output]
    assert [piece.result is not None for piece in pieces].count(True) == 1


def test_abort_ends_all_answers_once() -> None:
    """FAILURES 90: one answer has ended, the call is aborted by its id."""
    engine = make_engine(flat(), pages=20)
    name = engine.add_request(PROMPT, sampled(n=3, stop="e", max_tokens=40))
    while not any(piece.output is not None for piece in engine.step()):
        pass
    result = engine.abort(name)
    assert result is not None
    assert [output.index for output in result.outputs] == [0, 1, 2]
    reasons = {output.finish_reason for output in result.outputs}
    assert reasons == {FinishReason.STOP, FinishReason.ABORT}
    assert engine.abort(name) is None
    assert not engine.has_unfinished
    assert engine.manager.usage().used == 0
    check(engine.manager)


def test_answers_after_an_abort_in_the_queue() -> None:
    engine = make_engine(flat(), pages=20)
    name = engine.add_request(PROMPT, sampled())
    result = engine.abort(name)
    assert result is not None
    assert len(result.outputs) == 1, "the others had not begun"


def test_a_failing_answer_ends_alone() -> None:
    """FAILURES 123: an exception that belongs to one answer leaves the others."""
    engine = make_engine(flat(), pages=20)
    name = engine.add_request(PROMPT, sampled(n=2))
    engine.step()
    broken = next(live for live in engine._live.values() if live.index == 1)
    broken.sampler.params = None  # type: ignore[assignment]
    _, results = run(engine)
    reasons = [output.finish_reason for output in results[name].outputs]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR]
    assert results[name].error is not None


def test_a_step_that_fails_after_branching_leaves_no_answer_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branches began in that very step: they end with it, and the engine goes on."""

    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    engine = make_engine(flat(), pages=20)
    name = engine.add_request(PROMPT, sampled(n=3))
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "sample", broken)
        pieces = engine.step()
    assert [piece.output.finish_reason for piece in pieces if piece.output] == [FinishReason.ERROR] * 3
    assert [piece.request_id for piece in pieces if piece.result] == [name]
    other = engine.add_request("hello", greedy(2))
    assert run(engine)[1][other].error is None


def test_greedy_answers_are_equal() -> None:
    engine = make_engine(pages=20)
    name = engine.add_request("hello", greedy(4, n=3))
    assert texts(run(engine)[1][name]) == [expected_text("hello", 4)] * 3


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
@pytest.mark.parametrize("pages", [3, 5, 8, 13])
def test_many_calls_of_several_answers_end_in_a_small_pool(pages: int, policy: str) -> None:
    scheduling = {"capacity_scheduler_policy": policy}
    engine = make_engine(flat(), pages=pages, max_seq_len=48, max_batch_size=6, scheduler_config=scheduling)
    params = [sampled(n=n, seed=n, max_tokens=10) for n in (3, 1, 4, 2, 5)]
    names = [engine.add_request(PROMPT[: 9 + 4 * at], each) for at, each in enumerate(params)]
    _, results = run(engine)
    for name, each in zip(names, params, strict=True):
        assert [output.finish_reason for output in results[name].outputs] == [FinishReason.LENGTH] * each.n


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    engine = make_engine()
    name = engine.add_request("hi", greedy(3, logprobs=2, logit_bias={0: -1.0}, presence_penalty=0.5))
    pieces, results = run(engine)
    (output,) = results[name].outputs
    likeliest = 5.0 - math.log(math.exp(5.0) + VOCAB - 1)
    assert output.logprobs is not None
    assert [found.token_id for found in output.logprobs] == list(output.token_ids)
    for found in output.logprobs:
        assert found.logprob == pytest.approx(likeliest, abs=1e-5)
        assert [token for token, _ in found.top] == [found.token_id, 0]
        assert found.top[1][1] == pytest.approx(likeliest - 5.0, abs=1e-5)
    assert [found for piece in pieces for found in piece.logprobs] == list(output.logprobs)


def test_logprobs_without_others() -> None:
    engine = make_engine()
    name = engine.add_request("hi", greedy(2, logprobs=0))
    output = run(engine)[1][name].outputs[0]
    assert output.logprobs is not None
    assert [found.top for found in output.logprobs] == [(), ()]
    name = engine.add_request("hi", greedy(2))
    assert run(engine)[1][name].outputs[0].logprobs is None


def test_bias_bans_and_forces_tokens() -> None:
    engine = make_engine()
    forced = engine.add_request("hi", greedy(3, logit_bias={ord("q"): 100.0}))
    banned = engine.add_request("hi", greedy(3, logit_bias={ord(expected_text("hi", 1)): -100.0}))
    plain = engine.add_request("hi", greedy(3))
    _, results = run(engine)
    assert texts(results[forced]) == ["qqq"]
    assert texts(results[banned])[0][0] != expected_text("hi", 1)
    assert texts(results[plain]) == [expected_text("hi", 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, r"n must be in \[1, 128\], got 0"),
        ({"n": 129}, "got 129"),
        ({"logprobs": 21}, r"logprobs must be in \[0, 20\]"),
        ({"logprobs": True}, "logprobs must be an integer"),
        ({"logit_bias": {1: 101}}, r"logit_bias must be in \[-100, 100\]"),
        ({"logit_bias": {-1: 1}}, "a token id of logit_bias must be in"),
        ({"logit_bias": {"x": 1}}, "a token id of logit_bias must be an integer"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"logit_bias": dict.fromkeys(range(1025), 0)}, "at most 1024 entries, got 1025"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must be in"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**options)
