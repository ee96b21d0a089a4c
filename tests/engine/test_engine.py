"""Engine and LLM on a model without weights: delivery, ends, errors, aborts, interrupts."""

from __future__ import annotations

import pytest
from fake_model import EOS, VOCAB, FakeModel, expected_text

from pagedkv.cache import check
from pagedkv.config import EngineConfig
from pagedkv.engine.engine import Engine
from pagedkv.engine.llm import LLM
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.request import FinishReason
from pagedkv.errors import ConfigError, InvalidRequestError, NeverFitsError, OutOfMemoryBudgetError, QueueFullError


def make_engine(model: FakeModel | None = None, pages: int = 8, max_seq_len: int = 96, **settings) -> Engine:
    config = EngineConfig(max_seq_len=max_seq_len, kv_cache_config={"max_tokens": pages * 16}, **settings)
    return Engine(model or FakeModel(), config)


def greedy(max_tokens: int = 5, **kw) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kw)


def drain(engine: Engine) -> dict:
    """Step to the end, audited; returns (streamed text, result) by request id."""
    streamed, results = {}, {}
    while engine.has_unfinished:
        for piece in engine.step():
            streamed[piece.request_id] = streamed.get(piece.request_id, "") + piece.text
            if piece.result:
                assert piece.request_id not in results, "two terminal events"
                results[piece.request_id] = piece.result
        check(engine.manager)
    assert engine.manager.usage().used == 0
    return {name: (streamed[name], result) for name, result in results.items()}


def test_warming_up_first_is_counted_nowhere_and_later_wipes_nothing():
    engine = make_engine()
    engine.warm_up()
    assert (engine.stats().steps, engine.stats().prompt_tokens, engine.stats().generated_tokens) == (0, 0, 0)
    engine.add_request("hello", greedy(3))
    drain(engine)
    engine.warm_up()
    assert engine.stats().prompt_tokens == 6


def test_a_pool_beyond_the_memory_of_the_machine_is_refused():
    with pytest.raises(OutOfMemoryBudgetError, match=r"the pool cannot be made: .* of memory; .* are free"):
        make_engine(pages=2**42)


class TestDelivery:
    def test_text_streams_and_the_result_is_the_same(self):
        engine = make_engine()
        a, b = engine.add_request("hello", greedy(5)), engine.add_request("worlds", greedy(3))
        out = drain(engine)
        for name, prompt, count in ((a, "hello", 5), (b, "worlds", 3)):
            text, result = out[name]
            assert text == result.outputs[0].text == expected_text(prompt, count)
            assert result.outputs[0].finish_reason is FinishReason.LENGTH
            assert (result.prompt, result.prompt_token_ids) == (prompt, list(prompt.encode()))

    def test_the_end_of_sequence_ends_the_text_and_is_not_in_it(self):
        engine = make_engine(FakeModel(script={6: EOS}))
        name = engine.add_request("hello", greedy(9))
        text, result = drain(engine)[name]
        assert text == expected_text("hello", 2)
        assert (result.outputs[0].finish_reason, result.outputs[0].token_ids[-1]) == (FinishReason.STOP, EOS)

    def test_ignore_eos_goes_on(self):
        engine = make_engine(FakeModel(script={6: EOS}))
        name = engine.add_request("hello", greedy(9, ignore_eos=True))
        assert len(drain(engine)[name][1].outputs[0].token_ids) == 9

    def test_a_stop_token_is_named_as_the_reason(self):
        engine = make_engine(FakeModel(script={6: ord("!")}))
        name = engine.add_request("hello", greedy(9, stop_token_ids=[ord("!")]))
        _, result = drain(engine)[name]
        assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == (FinishReason.STOP, ord("!"))

    def test_a_stop_token_stays_in_the_text_where_the_request_asks_for_it(self):
        engine = make_engine(FakeModel(script={6: ord("!")}))
        name = engine.add_request("hello", greedy(9, stop_token_ids=[ord("!")], include_stop_str_in_output=True))
        text, result = drain(engine)[name]
        assert text == result.outputs[0].text == expected_text("hello", 2) + "!"

    def test_a_stop_text_that_the_end_of_a_cut_character_completes_is_the_reason(self):
        engine = make_engine(FakeModel(script={4: 0xF0}))
        name = engine.add_request("hello", greedy(1, stop="\ufffd"))
        output = drain(engine)[name][1].outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("", FinishReason.STOP, "\ufffd")

    def test_failure_112_a_bias_outside_the_vocabulary_is_refused(self):
        with pytest.raises(InvalidRequestError, match="token id of logit_bias 257 is outside the vocabulary of 257"):
            make_engine().add_request("hello", greedy(1, logit_bias={256: 1.0, 257: 1.0}))

    def test_failure_117_a_stop_text_over_two_tokens_never_shows_and_frees_the_pages_at_that_step(self):
        """Failure 117 (vllm-project/vllm#55483)."""
        engine = make_engine(FakeModel(script={4: ord("a"), 5: ord("b"), 6: ord("c"), 7: ord("d")}))
        name = engine.add_request("hello", greedy(9, stop="bc"))
        pieces = []
        while engine.has_unfinished:
            pieces += engine.step()
        assert "".join(piece.text for piece in pieces) == "a"
        assert pieces[-1].result.outputs[0].stop_reason == "bc"
        assert engine.manager.usage().used == 0
        assert name == pieces[-1].request_id

    def test_a_character_cut_by_max_tokens_is_a_replacement_character_streamed_and_whole(self):
        script = dict(enumerate("é".encode(), start=4))
        engine = make_engine(FakeModel(script=script))
        name = engine.add_request("hello", greedy(1))
        text, result = drain(engine)[name]
        assert text == result.outputs[0].text == "\ufffd"

    def test_a_cached_prompt_is_told_and_counted_once(self):
        engine = make_engine()
        prompt = "p" * 40
        for expected in (0, 32):
            name = engine.add_request(prompt, greedy(2))
            assert drain(engine)[name][1].num_cached_tokens == expected
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.cached_tokens) == (80, 32)


class TestRefusal:
    @pytest.mark.parametrize("prompt", ["", []])
    def test_failure_110_an_empty_prompt_is_refused_and_the_engine_lives(self, prompt):
        """Failure 110 (CVE-2024-8768)."""
        engine = make_engine()
        with pytest.raises(InvalidRequestError, match="empty"):
            engine.add_request(prompt)
        engine.add_request("x", greedy(1))
        drain(engine)

    @pytest.mark.parametrize("ids", [[-1], [VOCAB], [1.5], ["a"], [[1]]])
    def test_failure_112_token_ids_outside_the_vocabulary_are_refused(self, ids):
        """Failure 112 (sgl-project/sglang#28794): ids 0 and V - 1 work, -1 and V do not."""
        engine = make_engine()
        with pytest.raises(InvalidRequestError):
            engine.add_request(ids)
        engine.add_request([0, VOCAB - 1], greedy(1))
        drain(engine)

    def test_failure_119_the_id_of_a_live_request_is_refused_and_works_again_later(self):
        """Failure 119 (vllm-project/vllm#10583)."""
        engine = make_engine()
        engine.add_request("a", greedy(2), request_id="x")
        with pytest.raises(InvalidRequestError, match="'x' belongs to a request that has not ended"):
            engine.add_request("b", greedy(2), request_id="x")
        drain(engine)
        engine.add_request("b", greedy(2), request_id="x")
        assert drain(engine)["x"][0] == expected_text("b", 2)

    def test_failure_123_a_namespace_that_the_manager_could_not_use_is_refused_at_the_edge(self):
        """Failure 123 (CVE-2026-105756): a field that only the scheduler looks at must not end the engine."""
        engine = make_engine()
        with pytest.raises(InvalidRequestError, match="a namespace of type list cannot be hashed"):
            engine.add_request("a", namespace=["x"])
        assert engine.step() == []

    def test_what_never_fits_is_refused_with_the_numbers(self):
        engine = make_engine(pages=8, max_seq_len=96)
        with pytest.raises(NeverFitsError, match=r"90 prompt tokens \+ max_tokens 7 = 97 tokens; max_seq_len is 96"):
            engine.add_request("x" * 90, greedy(7))
        assert not engine.has_unfinished

    def test_a_full_queue_refuses(self):
        engine = make_engine(max_queue_size=1)
        engine.add_request("a")
        with pytest.raises(QueueFullError):
            engine.add_request("b")
        assert len(engine._calls) == 1

    def test_a_budget_smaller_than_one_request_is_refused_at_the_start(self):
        with pytest.raises(OutOfMemoryBudgetError, match="5 pages"):
            make_engine(pages=5, max_seq_len=97)

    def test_max_seq_len_beyond_the_model_is_refused(self):
        with pytest.raises(ConfigError, match="max_seq_len is 5000; model 'fake' was made for 4096"):
            make_engine(pages=400, max_seq_len=5000)


class TestFaults:
    def test_a_row_that_cannot_be_sampled_fails_alone(self):
        def poison(tokens, logits):
            logits[(logits[:, ord("z")] == 0).nonzero()[0][0]] = float("nan")

        engine = make_engine()
        a, b = engine.add_request("hello", greedy(3)), engine.add_request("other", greedy(3))
        engine.model.fault = poison
        first = engine.step()
        engine.model.fault = None
        assert [piece.request_id for piece in first if piece.finished] == [a]
        assert first[0].result.outputs[0].finish_reason is FinishReason.ERROR
        assert first[0].result.error
        assert first[0].result.outputs[0].text == first[0].text
        text, result = drain(engine)[b]
        assert result.outputs[0].text == expected_text("other", 3)
        assert result.outputs[0].text.endswith(text)

    def test_a_failing_forward_ends_the_requests_of_its_step_and_the_engine_lives(self):
        def fail(tokens, logits):
            raise MemoryError("no room for activations")

        engine = make_engine(max_batch_size=1)
        a, b = engine.add_request("hello", greedy(3)), engine.add_request("other", greedy(3))
        engine.model.fault = fail
        (piece,) = engine.step()
        engine.model.fault = None
        assert (piece.request_id, piece.result.error) == (a, "MemoryError: no room for activations")
        check(engine.manager)
        assert drain(engine)[b][0] == expected_text("other", 3)

    @pytest.mark.parametrize("where", ["runner.logits", "scheduler.commit", "_sample", "_deliver"])
    @pytest.mark.parametrize("after", [False, True])
    def test_an_interrupt_leaves_nothing_half_done(self, monkeypatch, where, after):
        engine = make_engine()
        engine.add_request("hello", greedy(3))
        owner, _, name = where.rpartition(".")
        owner = getattr(engine, owner) if owner else engine
        original = getattr(owner, name)

        def interrupted(*args):
            if after:
                original(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        check(engine.manager)
        assert not engine.has_unfinished
        name = engine.add_request("again", greedy(3))
        assert drain(engine)[name][0] == expected_text("again", 3)


class TestAbort:
    def test_in_every_state_and_twice(self):
        engine = make_engine(max_batch_size=1, max_num_tokens=16)
        running, waiting = engine.add_request("r" * 40, greedy(5)), engine.add_request("w", greedy(5))
        engine.step()
        for name in (waiting, running):
            result = engine.abort(name)
            assert result.outputs[0].finish_reason is FinishReason.ABORT
            assert engine.abort(name) is None
        assert engine.manager.usage().used == 0
        assert engine.step() == []

    def test_an_aborted_text_is_what_was_streamed(self):
        engine = make_engine(FakeModel(script={4: ord("a"), 5: ord("b")}))
        name = engine.add_request("hello", greedy(9, stop="bc"))
        pieces = engine.step() + engine.step()
        assert engine.abort(name).outputs[0].text == "".join(piece.text for piece in pieces) == "a"

    def test_failure_60_gauges_are_right_without_a_further_step(self):
        """Failure 60 (vllm-project/vllm#29928)."""
        engine = make_engine()
        names = [engine.add_request("hello", greedy(5)) for _ in range(3)]
        engine.step()
        for name in names:
            engine.abort(name)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.usage.used) == (0, 0, 0)


class TestLLM:
    @pytest.fixture
    def llm(self):
        llm = LLM.__new__(LLM)
        llm.engine = make_engine(max_queue_size=2)
        return llm

    def test_failure_125_two_batches_on_one_engine_come_back_in_order(self, llm):
        """Failure 125 (huggingface/transformers#45943); the batches are longer than the queue, too."""
        for batch in (["one", "three", "five"], ["x", "yy", "zzz"]):
            outputs = llm.generate(batch, [greedy(n) for n in (6, 1, 3)])
            assert [o.outputs[0].text for o in outputs] == [
                expected_text(p, n) for p, n in zip(batch, (6, 1, 3), strict=True)
            ]

    def test_one_prompt_as_text_or_as_ids(self, llm):
        assert llm.generate("hi", greedy(2))[0].outputs[0].text == expected_text("hi", 2)
        assert llm.generate([104, 105], greedy(2))[0].outputs[0].text == expected_text("hi", 2)

    def test_a_wrong_prompt_ends_those_before_it(self, llm):
        with pytest.raises(InvalidRequestError):
            llm.generate(["fine", ""], greedy(2))
        assert not llm.engine.has_unfinished

    def test_as_many_params_as_prompts(self, llm):
        with pytest.raises(InvalidRequestError, match="1 sampling params for 2 prompts"):
            llm.generate(["a", "b"], [greedy()])

    def test_leaving_a_stream_early_ends_the_request(self, llm):
        stream = llm.stream("hello", greedy(50))
        assert next(stream).text == expected_text("hello", 1)
        stream.close()
        assert not llm.engine.has_unfinished

    def test_unknown_settings_are_refused_by_name(self):
        with pytest.raises(ConfigError, match="max_batch_sise"):
            LLM(max_batch_sise=3)


def test_partial_reuse_finds_all_but_the_last_token_of_a_prompt_seen_before():
    cache = {"max_tokens": 8 * 16, "enable_partial_reuse": True}
    engine = Engine(FakeModel(), EngineConfig(max_seq_len=96, kv_cache_config=cache))
    prompt = "abcdefghijklmnopqrstuvwxyzabcdefgh"
    copies = []
    copy_pages = engine.store.copy_pages
    engine.store.copy_pages = lambda source, target: (copies.append(len(source)), copy_pages(source, target))
    for cached in (0, 33):  # two whole pages, and one of the two tokens in the last one
        name = engine.add_request(prompt, greedy(3))
        assert drain(engine)[name][1].num_cached_tokens == cached
    name = engine.add_request(prompt[:30], greedy(3))
    assert drain(engine)[name][1].num_cached_tokens == 29
    assert copies == [1, 1]
