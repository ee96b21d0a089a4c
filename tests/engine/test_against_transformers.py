"""The engine on the embedded default model against transformers itself: tokens, logits, placement."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.cache import check
from pagedkv.config import EngineConfig
from pagedkv.engine.allocators import ALLOCATORS
from pagedkv.engine.engine import Engine
from pagedkv.engine.params import SamplingParams
from pagedkv.models.load import load_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NEAR_TIE = 1e-3
"""Where the reference's two best logits are closer than this, another order of summation may choose the other."""

BF16_LOGIT_TOLERANCE = 0.35
"""Keys and values rounded to 8 bits of mantissa (relative error up to 2**-9), 30 layers, logits of about +-20."""

WORDS = ["river", "stone", "lamp", "green", "seven", "under", "music", "paper", "travel", "winter", "bread", "cloud"]


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(dtype="float32")


@pytest.fixture(scope="module")
def reference(model: Any) -> Any:
    """The same weights with transformers' own attention."""
    twin = copy.deepcopy(model.model)
    twin.set_attn_implementation("sdpa")
    return twin


@pytest.fixture(scope="module")
def prompts(model: Any) -> list[list[int]]:
    """32 prompts of 1 to about 120 tokens; many begin alike, some are a prefix of another."""
    rng = random.Random(5)
    shared = "You are a careful assistant. Answer in one sentence. " * 3
    texts = []
    for i in range(32):
        tail = " ".join(rng.choices(WORDS, k=rng.choice((1, 3, 10, 40, 80))))
        texts.append(shared[: rng.choice((60, 120, 156))] + tail if i % 2 else tail)
    return [model.tokenizer(text)["input_ids"] for text in texts]


def engine_with(model: Any, kv_dtype: str, max_tokens: int, **settings: Any) -> Engine:
    cache = {"max_tokens": max_tokens, "dtype": kv_dtype}
    return Engine(model, EngineConfig(max_seq_len=256, kv_cache_config=cache, **settings))


def generate(engine: Engine, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """Greedy outputs, with the pool audited after every step."""
    names = [
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    results = {}
    while engine.has_unfinished:
        for piece in engine.step():
            if piece.result:
                assert piece.result.error is None
                results[piece.request_id] = list(piece.result.outputs[0].token_ids)
        check(engine.manager)
    return [results[name] for name in names]


@torch.inference_mode()
def assert_greedy(reference: Any, prompt: list[int], output: list[int]) -> None:
    """Each token is the one that the reference would choose after the tokens before it, or a near tie.

    By induction this is what `generate` returns, at the price of one forward pass.
    """
    logits = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float()
    for position, token in enumerate(output):
        best = torch.topk(logits[position], 2).values
        if token != int(logits[position].argmax()):
            assert logits[position, token] >= best[0] - NEAR_TIE, f"token {position} of {output}"
            return  # after a near tie the texts may part


def test_greedy_tokens_equal_transformers_under_chunking_preemption_prefix_hits_and_full_batching(
    model: Any, reference: Any, prompts: list[list[int]]
) -> None:
    rng = random.Random(6)
    counts = [rng.randint(1, 24) for _ in prompts]
    engine = engine_with(model, "float32", 416, max_num_tokens=48)
    outputs = generate(engine, prompts, counts)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.peak_running > 8
    for prompt, output, count in zip(prompts, outputs, counts, strict=True):
        assert len(output) == count
        assert_greedy(reference, prompt, output)


def test_greedy_tokens_equal_transformers_generate(model: Any, reference: Any, prompts: list[list[int]]) -> None:
    chosen = sorted(prompts, key=len)[::11]
    outputs = generate(engine_with(model, "float32", 1024), chosen, [12] * len(chosen))
    for prompt, output in zip(chosen, outputs, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        if output != expected[0, len(prompt) :].tolist():
            assert_greedy(reference, prompt, output)


def test_failure_109_the_same_tokens_for_every_cache_chunk_and_preemption(model: Any, prompts: list[list[int]]) -> None:
    """Failure 109 (modular/modular#6681): cache on and off, chunks of less, exactly and more than a page, or all."""
    few = [sorted(prompts, key=len)[i] for i in (2, 12, 25)]
    answers = set()
    for reuse in ("whole pages", "parts of pages", "none"):
        for step_tokens in (15, 16, 17, 512):
            cache: dict[str, Any] = {"max_tokens": 512, "dtype": "float32", "enable_block_reuse": reuse != "none"}
            cache["enable_partial_reuse"] = reuse == "parts of pages"
            config = EngineConfig(max_seq_len=256, max_num_tokens=step_tokens, kv_cache_config=cache)
            engine = Engine(model, config)
            for _ in range(2):  # the second time is warm where reuse is on
                answers.add(str(generate(engine, few, [6, 6, 6])))
    assert len(answers) == 1


def test_the_allocator_changes_no_token(model: Any, prompts: list[list[int]]) -> None:
    """Paged; a reservation at a time; and rooms so tight that requests must move, keys and values with them."""
    outputs = {}
    for allocator in ALLOCATORS:
        cache = {"max_tokens": 256 + 64, "dtype": "float32"}
        engine = Engine(model, EngineConfig(max_seq_len=256, kv_cache_config=cache), allocator=allocator)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        names = [engine.add_request(prompt, params) for prompt in prompts[:6]]
        results = {}
        while engine.has_unfinished:
            results |= {piece.request_id: piece.result for piece in engine.step() if piece.result}
        outputs[allocator] = [results[name].outputs[0].token_ids for name in names]
        assert engine.manager.usage().used == 0
        if allocator == "growing":
            assert engine.manager.moved_pages > 0
    assert outputs["paged"] == outputs["contiguous"] == outputs["growing"]


def run_recorded(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """Greedy output of one prompt that runs alone, and the logits behind each token, float32 [count, vocabulary]."""
    seen: list[np.ndarray] = []
    forward = engine.runner.logits

    def recording(step: Any, table: Any) -> torch.Tensor:
        logits = forward(step, table)
        seen.extend(logits.numpy())
        return logits

    engine.runner.logits = recording  # type: ignore[method-assign]
    (output,) = generate(engine, [prompt], [count])
    engine.runner.logits = forward  # type: ignore[method-assign]
    return output, np.stack(seen)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float32", 5e-4), ("bfloat16", BF16_LOGIT_TOLERANCE)])
def test_logits_stay_within_tolerance_of_the_reference(
    model: Any, reference: Any, prompts: list[list[int]], kv_dtype: str, tolerance: float
) -> None:
    engine = engine_with(model, kv_dtype, 2048)
    for prompt in sorted(prompts, key=len)[::6]:
        output, logits = run_recorded(engine, prompt, 8)
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float().numpy()
        assert np.abs(logits - expected).max() < tolerance


def test_failure_30_a_warm_prompt_has_the_logits_of_a_cold_one(model: Any, prompts: list[list[int]]) -> None:
    """Failure 30 (Wenyueh/MinivLLM#98): positions go on after the cached pages, and attention reads them."""
    engine = engine_with(model, "float32", 512)
    prompt = max(prompts, key=len)
    cold_output, cold = run_recorded(engine, prompt, 4)
    warm_output, warm = run_recorded(engine, prompt, 4)
    assert engine.stats().cached_tokens == (len(prompt) - 1) // 16 * 16
    assert warm_output == cold_output
    assert np.abs(warm - cold).max() < 5e-4


def test_poisoned_free_pages_change_nothing(model: Any, prompts: list[list[int]]) -> None:
    """Before every step, pages that nobody holds are filled with NaN; the logits are the same bit for bit."""
    prompt = max(prompts, key=len)
    output, clean = run_recorded(engine_with(model, "bfloat16", 512), prompt, 4)
    engine = engine_with(model, "bfloat16", 512)
    schedule = engine.scheduler.schedule

    def poisoned() -> Any:
        step = schedule()
        free = torch.from_numpy(np.flatnonzero(engine.manager.pool.refcount == 0)[1:])  # not the null page
        for layer in engine.store.layers:
            layer.key[free] = float("nan")
            layer.value[free] = float("nan")
        return step

    engine.scheduler.schedule = poisoned  # type: ignore[method-assign]
    poisoned_output, logits = run_recorded(engine, prompt, 4)
    assert poisoned_output == output
    assert np.array_equal(logits, clean)


def test_a_random_workload_with_aborts_leaves_a_clean_pool(model: Any) -> None:
    """Real forward passes, a tiny pool, aborts in the middle; audited after every step."""
    rng = random.Random(11)
    engine = engine_with(model, "bfloat16", 288, max_num_tokens=64, max_batch_size=6)
    for _ in range(40):
        prompt = [rng.randrange(10, 500)] * rng.randint(1, 3) + [7] * rng.choice((1, 17, 40))
        engine.add_request(prompt, SamplingParams(temperature=1, max_tokens=rng.randint(1, 8), seed=1))
        engine.step()
        check(engine.manager)
        if rng.random() < 0.3 and engine.has_unfinished:
            engine.abort(rng.choice(sorted(engine._calls)))
            check(engine.manager)
    while engine.has_unfinished:
        engine.step()
        check(engine.manager)
    usage = engine.manager.usage()
    assert usage.used == 0
    assert usage.free + usage.cached == usage.total
