"""Sampling: each row against a float64 oracle, alone or in any company, and bad rows alone in their failure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine import sampler as sampler_module
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.sampler import SamplerState, sample
from pagedkv.errors import InvalidRequestError

INF = float("inf")


def rows_of(*rows: Sequence[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def one(logits: Sequence[float] | np.ndarray, state: SamplerState) -> int:
    result = sample(torch.as_tensor(np.asarray(logits, dtype=np.float32)).unsqueeze(0), [state])
    assert not result.errors
    return int(result.token_ids[0])


def oracle(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """What is left of one row: ids in the order of the inverse CDF, and their probabilities (float64)."""
    x = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in output:
        x[token] -= params.frequency_penalty
    for token in set(output):
        x[token] -= params.presence_penalty
    order = np.argsort(-x, kind="stable")
    if params.greedy:
        return order[:1], np.ones(1)
    p = np.exp((x - x.max()) / params.temperature)
    p = p[order] / p.sum()
    n = int((p >= params.min_p * p[0]).sum())
    n = min(n, params.top_k) if params.top_k > 0 else n
    p = p[:n] / p[:n].sum()
    if params.top_p < 1.0:
        n = 1 + int((np.cumsum(p)[:-1] < params.top_p).sum())
        p = p[:n] / p[:n].sum()
    ids = order[:n]
    if not params.has_filter:
        p, ids = p[np.argsort(ids)], np.sort(ids)
    return ids, p


class Fixed(SamplerState):
    def __init__(self, params: SamplingParams, uniform: float) -> None:
        super().__init__(params)
        self.uniform = uniform

    def draw(self) -> float:
        return self.uniform


options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 255, 256, 257, 280, 5000]),
        "top_p": st.sampled_from([1.0, 1.0, 0.03, 0.37, 0.9, 0.9995]),
        "min_p": st.sampled_from([0.0, 0.0, 0.001, 0.1, 0.7, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.7, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.1, -0.9]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.6, -0.3]),
    }
)


@settings(max_examples=150, deadline=None)
@given(options, st.integers(0, 10**6), st.sampled_from([1, 2, 7, 256, 257, 600, 1536]), st.sampled_from([0.5, 3.0]))
def test_a_token_is_where_the_oracle_cdf_passes_the_drawn_number(
    chosen: dict[str, float], seed: int, vocab: int, spread: float
) -> None:
    params = SamplingParams(seed=seed, **chosen)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, vocab, 5).tolist()
    state, twin = SamplerState(params, prompt), SamplerState(params, prompt)
    output: list[int] = []
    for _ in range(4):
        logits = (rng.standard_normal(vocab) * spread).astype(np.float32)
        token = one(logits, state)
        ids, probs = oracle(logits, params, prompt, output)
        place = np.flatnonzero(ids == token)
        assert place.size == 1, "a token that the filters remove"
        if not params.greedy:
            high = np.cumsum(probs)
            low = high - probs
            assert low[place[0]] - 1e-5 <= twin.draw() <= high[place[0]] + 1e-5
        state.record(token)
        output.append(token)


@pytest.mark.parametrize(
    "chosen",
    [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}],
)
def test_frequencies_follow_the_distribution(chosen: dict[str, float]) -> None:
    params = SamplingParams(seed=11, **chosen)  # type: ignore[arg-type]
    logits = np.log(np.array([0.02, 0.3, 0.08, 0.25, 0.1, 0.05, 0.15, 0.05]), dtype=np.float32)
    draws, state = 8000, SamplerState(params)
    tokens = np.concatenate(
        [sample(torch.from_numpy(logits).expand(400, -1), [state] * 400).token_ids for _ in range(draws // 400)]
    )
    ids, probs = oracle(logits, params, [], [])
    counts = np.bincount(tokens, minlength=8)
    assert counts.sum() == counts[ids].sum() == draws
    chi2 = float(((counts[ids] - draws * probs) ** 2 / (draws * probs)).sum())
    # 24.3 is the 0.999 quantile of chi-square with 7 degrees of freedom, the most that any case here has.
    assert chi2 < 24.3


row_specs = st.lists(st.tuples(options, st.integers(0, 50)), min_size=2, max_size=7)


@settings(max_examples=60, deadline=None)
@given(row_specs, st.sampled_from([5, 300, 1100]), st.randoms(use_true_random=False), st.booleans())
def test_tokens_do_not_depend_on_the_company(specs: list, vocab: int, random, coarse: bool) -> None:
    """Bit for bit: alone, in a batch, in another order, in chunks of another size."""
    rng = np.random.default_rng(vocab + len(specs))
    logits = (rng.standard_normal((3, len(specs), vocab)) * 2).astype(np.float32)
    if coarse:
        logits = np.round(logits)  # many equal logits, as 16-bit models give
    prompts = rng.integers(0, vocab, (len(specs), 4)).tolist()

    def states() -> list[SamplerState]:
        return [SamplerState(SamplingParams(seed=s, **o), p) for (o, s), p in zip(specs, prompts, strict=True)]

    def run(order: list[int]) -> list[list[int]]:
        own, tokens = states(), [[] for _ in specs]
        for step in range(3):
            result = sample(torch.from_numpy(logits[step][order]), [own[i] for i in order])
            assert not result.errors
            for i, token in zip(order, result.token_ids.tolist(), strict=True):
                own[i].record(token)
                tokens[i].append(token)
        return tokens

    together = run(list(range(len(specs))))
    assert [run([i])[i] for i in range(len(specs))] == together
    shuffled = list(range(len(specs)))
    random.shuffle(shuffled)
    assert run(shuffled) == together


@pytest.mark.parametrize("chosen", [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 1e-4}])
def test_a_wide_row_is_the_same_in_a_batch_of_any_size(chosen: dict[str, float]) -> None:
    """A vocabulary wide enough that torch splits rows over threads, and over several chunks."""
    vocab, batch = 50_001, 50
    logits = torch.randn(batch, vocab, generator=torch.Generator().manual_seed(0)) * 2
    params = [SamplingParams(seed=i, **chosen) for i in range(batch)]  # type: ignore[arg-type]
    together = sample(logits, [SamplerState(p) for p in params]).token_ids
    for size in (1, 3):
        for start in (0, batch - size):
            part = slice(start, start + size)
            alone = sample(logits[part].clone(), [SamplerState(p) for p in params[part]]).token_ids
            np.testing.assert_array_equal(alone, together[part])


def test_the_same_seed_repeats_and_others_differ() -> None:
    """Failure 89 (vllm-project/vllm#11898, sgl-project/sglang#28805): n samples of a seed differ, and repeat."""
    logits = np.zeros(1000, dtype=np.float32)

    def tokens(seed: int | None, sample_index: int = 0) -> list[int]:
        state = SamplerState(SamplingParams(seed=seed), sample_index=sample_index)
        return [one(logits, state) for _ in range(8)]

    assert tokens(7) == tokens(7)
    assert [tokens(7, i) for i in range(4)] == [tokens(7, i) for i in range(4)]
    distinct = [tokens(7, i) for i in range(4)] + [tokens(s) for s in (8, -7, 2**63 - 1, -(2**63))]
    distinct += [tokens(None), tokens(None)]
    assert len({tuple(t) for t in distinct}) == len(distinct)


def test_a_fork_shares_nothing_with_its_parent() -> None:
    """Failure 94 (SciSharp/LLamaSharp#621): one branch's penalties never reach the other."""
    parent = SamplerState(SamplingParams(temperature=0.0, frequency_penalty=2.0))
    parent.record(1)
    child = parent.fork(1)
    for _ in range(20):
        child.record(0)
        child.record(2)
    assert one([3.0, 3.0, 2.0], parent) == 0
    assert one([3.0, 3.0, 2.0], child) == 1
    child.record(1)
    parent.record(0)
    assert [a.tolist() for a in parent.seen()] == [[1, 0], [1, 1]]
    assert [a.tolist() for a in child.seen()] == [[1, 0, 2], [2, 20, 20]]


def test_forks_of_one_seed_draw_apart_and_repeat() -> None:
    def draws() -> list[float]:
        parent = SamplerState(SamplingParams(seed=3))
        return [s.draw() for s in (parent, parent.fork(1), parent.fork(2), parent.fork(1).fork(1))]

    assert draws() == draws()
    assert len(set(draws())) == 4


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0, repetition_penalty=2.0)])
def test_the_logits_are_not_modified(params: SamplingParams) -> None:
    """Failure 94: two branches may look at one logits buffer."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    sample(logits, [SamplerState(params, [1, 2, 3]) for _ in range(4)])
    assert torch.equal(logits, before)


def test_greedy_takes_the_first_of_equals_and_draws_nothing() -> None:
    states = [SamplerState(SamplingParams(temperature=0.0, seed=1)) for _ in range(2)]
    result = sample(rows_of([1, 5, 5, 0], [2, 2, 2, 2]), states)
    assert result.token_ids.tolist() == [1, 0]
    assert result.token_ids.dtype == np.int64
    assert states[0].draw() == SamplerState(SamplingParams(seed=1)).draw()


def test_one_number_is_drawn_per_sampled_token() -> None:
    state, twin = (SamplerState(SamplingParams(seed=5, top_k=2)) for _ in range(2))
    for _ in range(3):
        one([1.0, 2.0, 3.0], state)
        twin.draw()
    assert state.draw() == twin.draw()


@pytest.mark.parametrize("temperature", [1e-8, 1e-45, 5e-324])
def test_a_tiny_temperature_takes_the_largest(temperature: float) -> None:
    state = SamplerState(SamplingParams(temperature=temperature, seed=0))
    assert one([-3e38, 3e38, 1.0, -INF], state) == 1


def test_a_huge_temperature_never_takes_a_banned_token() -> None:
    state = SamplerState(SamplingParams(temperature=1e300, seed=0))
    assert {one([0.0, -INF, 9.0], state) for _ in range(60)} == {0, 2}


@pytest.mark.parametrize("chosen", [{}, {"top_k": 2}, {"top_p": 0.99}, {"min_p": 0.01}, {"top_k": 400}])
@pytest.mark.parametrize("vocab", [5, 256, 700])
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53, 1.0])
@pytest.mark.parametrize("at_end", [False, True])
def test_the_ends_of_the_unit_interval_never_take_a_removed_token(
    chosen: dict[str, float], vocab: int, uniform: float, at_end: bool
) -> None:
    logits = np.full(vocab, -INF, dtype=np.float32)
    low, high = (vocab - 2, vocab - 1) if at_end else (2, 3)
    logits[[low, high]] = 1.0, 1.5
    params = SamplingParams(**chosen)  # type: ignore[arg-type]
    first, last = (high, low) if params.has_filter else (low, high)
    assert one(logits, Fixed(params, uniform)) == (first if uniform == 0.0 else last)


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.7, 0.95])
def test_top_p_is_a_fraction_of_what_min_p_leaves_however_wide(top_p: float) -> None:
    logits = np.concatenate((np.linspace(0.0, -0.1, 300), np.full(700, -3.0))).astype(np.float32)
    params = SamplingParams(min_p=0.1, top_p=top_p)
    assert one(logits, Fixed(params, 1.0)) == oracle(logits, params, [], [])[0][-1]


@pytest.mark.parametrize("vocab", [6, 900])
def test_top_k_keeps_exactly_k_of_equals_the_lowest_ids(vocab: int) -> None:
    state = SamplerState(SamplingParams(top_k=3, seed=2))
    assert {one(np.zeros(vocab), state) for _ in range(100)} == {0, 1, 2}


def test_a_top_k_past_the_vocabulary_is_off() -> None:
    state = SamplerState(SamplingParams(top_k=10**6, seed=2))
    assert {one(np.zeros(3), state) for _ in range(60)} == {0, 1, 2}


def test_top_k_ranks_by_logit_where_temperature_rounds_to_equals() -> None:
    logits = np.full(400, 1.0, dtype=np.float32)
    logits[399] = np.nextafter(np.float32(1.0), np.float32(2.0))
    state = SamplerState(SamplingParams(temperature=1e25, top_k=1, seed=2))
    assert {one(logits, state) for _ in range(5)} == {399}


def test_repetition_penalty_counts_prompt_and_output_once() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    state = SamplerState(params, [0, 0, 2])
    assert one([4.0, 2.5, -1.0], state) == 1  # 2, 2.5, -2
    state.record(1)
    state.record(1)
    assert one([4.0, 2.5, -1.0], state) == 0  # 2, 1.25, -2
    assert one([-1.0, -1.1, -0.8], state) == 2  # -2, -2.2, -1.6


def test_presence_and_frequency_count_the_output_alone() -> None:
    prompt = [0, 0, 0]
    presence = SamplerState(SamplingParams(temperature=0.0, presence_penalty=1.0), prompt)
    frequency = SamplerState(SamplingParams(temperature=0.0, frequency_penalty=1.0), prompt)
    assert sample(rows_of([2, 1.5], [2, 1.5]), [presence, frequency]).token_ids.tolist() == [0, 0]
    for state in (presence, frequency):
        state.record(0)
        state.record(0)
    # presence: 2 - 1 against 0.5; frequency: 2 - 2 against 0.5
    assert sample(rows_of([2, 0.5], [2, 0.5]), [presence, frequency]).token_ids.tolist() == [0, 1]


def test_counts_survive_growth_and_tell_prompt_from_output() -> None:
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, 300, 50).tolist(), rng.integers(0, 300, 400).tolist()
    state = SamplerState(SamplingParams(repetition_penalty=1.1), prompt)
    for token in output:
        state.record(token)
    ids, counts = state.seen()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
        token: output.count(token) for token in set(prompt) | set(output)
    }


def test_bad_logits_fail_their_row_alone() -> None:
    good = [0.0, 1.0, 2.0]
    bad = {1: ([0.0, float("nan"), 1.0], "NaN"), 2: ([-INF] * 3, "finite"), 4: ([INF, 0.0, 0.0], "+inf")}
    logits = [bad[i][0] if i in bad else good for i in range(6)]
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.9)):
        result = sample(rows_of(*logits), [SamplerState(params) for _ in logits])
        expected = one(good, SamplerState(params))
        assert result.token_ids.tolist() == [-1 if i in bad else expected for i in range(6)]
        assert sorted(result.errors) == sorted(bad)
        assert all(word in result.errors[i] for i, (_, word) in bad.items())


class Raises(SamplerState):
    def draw(self) -> float:
        raise RuntimeError("no numbers today")


class OutOfVocabulary(SamplerState):
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([10**6]), np.array([1])


class Lopsided(SamplerState):
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([0, 1]), np.array([1])


@pytest.mark.parametrize("broken", [Raises, OutOfVocabulary, Lopsided, None])
def test_a_broken_state_fails_alone_and_the_others_draw_as_ever(broken: type[SamplerState] | None) -> None:
    params = SamplingParams(seed=4, repetition_penalty=1.2)
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(3))

    def good() -> list[SamplerState]:
        return [SamplerState(params, [1, 2]), SamplerState(SamplingParams(temperature=0.0))]

    expected_states, states = good(), good()
    expected = sample(logits[[0, 2]], expected_states).token_ids.tolist()
    middle = broken(params) if broken else None
    result = sample(logits, [states[0], middle, states[1]])  # type: ignore[list-item]
    assert result.token_ids.tolist() == [expected[0], -1, expected[1]]
    assert list(result.errors) == [1]
    assert states[0].draw() == expected_states[0].draw()


def test_rows_after_the_first_chunk_are_sampled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "CHUNK_ELEMENTS", 10)
    states = [SamplerState(SamplingParams(top_k=1 + i % 2 * 3, seed=i)) for i in range(7)]
    logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(2))
    tokens = sample(logits, states).token_ids
    assert tokens[::2].tolist() == logits.argmax(dim=1)[::2].tolist()
    assert (tokens >= 0).all()


def test_an_empty_step_samples_nothing() -> None:
    result = sample(torch.empty(0, 5), [])
    assert (result.token_ids.shape, result.errors) == ((0,), {})


@pytest.mark.parametrize("logits", [torch.zeros(2, 3), torch.zeros(3), torch.zeros(1, 3, dtype=torch.float64)])
def test_logits_of_the_wrong_shape_or_type_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(InvalidRequestError, match="float32"):
        sample(logits, [SamplerState(SamplingParams())])


def test_negative_token_ids_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="-1"):
        SamplerState(SamplingParams(repetition_penalty=2.0), [3, -1])
    with pytest.raises(InvalidRequestError, match="-5"):
        SamplerState(SamplingParams()).record(-5)


def test_logits_from_inference_mode_can_be_sampled() -> None:
    with torch.inference_mode():
        logits = torch.zeros(2, 3)
    states = [SamplerState(SamplingParams(repetition_penalty=2.0), [1]), SamplerState(SamplingParams(top_k=2))]
    assert not sample(logits, states).errors
