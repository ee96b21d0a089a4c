"""Choosing the next token of every row of a step, and the private state a request needs for it.

Responsible for bias, penalties, temperature, min_p, top_k, top_p, the draw, and for a bad row failing alone. Knows
nothing about requests, pages, text, or when generation ends.

The order is vLLM's: grammar -> logit bias -> repetition, frequency and presence penalty -> temperature -> min_p ->
top_k -> top_p; each filter looks at what the one before left, renormalised. Equal logits rank by lower id, so top_k
keeps exactly k.

A row's token is a function of its logits and its own state alone, to the bit: every reduction runs inside one
row in an order that does not depend on the other rows, and each row draws one number from its own generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.engine.draw import draw, draw_filtered
from pagedkv.engine.params import SamplingParams
from pagedkv.errors import InvalidRequestError

# Elements worked on at once: bounds the scratch memory and keeps it in the cache, whatever the batch.
CHUNK_ELEMENTS = 1 << 21
# Keeps 0 / temperature and -inf / temperature defined in float32; no distribution changes inside this range.
TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-30, 1e30

IntArray = npt.NDArray[np.int64]


class Grammar(Protocol):
    """What a sampler needs of a grammar."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, bool [vocabulary]."""
        ...

    def record(self, token: int) -> None:
        """The token was chosen."""
        ...

    def fork(self) -> Grammar:
        """A copy for another branch."""
        ...


class SamplerState:
    """What one sample of one request carries from token to token: its generator and its token counts.

    Memory is O(prompt + output), and only for requests with a penalty. A preempted request keeps its state:
    recomputing the pages of known tokens samples nothing, so it neither draws nor records.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] | IntArray = (),
        sample_index: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        """State before the first token.

        Args:
            params: the request's options.
            prompt_token_ids: the prompt, >= 0; read only for a repetition penalty.
            sample_index: which of the request's n samples this is. Samples of one seed differ from each other,
                and the set repeats with the seed.
            grammar: says which tokens may come next.

        Raises:
            InvalidRequestError: a token id is negative.
        """
        self.params = params
        self.grammar = grammar
        self.plain_greedy = params.greedy and not params.has_penalty and not params.logit_bias and grammar is None
        # SeedSequence takes no negative entropy; the two's complement keeps all 2**64 seeds distinct.
        entropy = None if params.seed is None else params.seed & (2**64 - 1)
        self._seed = np.random.SeedSequence(entropy, spawn_key=(sample_index,))
        self._generator = np.random.Generator(np.random.PCG64(self._seed))
        prompt: IntArray = np.empty(0, dtype=np.int64)
        if params.repetition_penalty != 1.0:
            prompt = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
            if prompt.size and prompt[0] < 0:
                raise InvalidRequestError(f"prompt token ids must be >= 0, got {prompt[0]}")
        # Distinct ids: first the prompt's, sorted, then those that only the output has, in order of arrival.
        self._ids, self._counts = prompt, np.zeros(prompt.size, dtype=np.int64)
        self._num_prompt = self._num_ids = prompt.size
        self._slots: dict[int, int] = {}

    def draw(self) -> float:
        """The next uniform number in [0, 1) of this sample's own generator: one per sampled token."""
        return self._generator.random()

    def record(self, token_id: int) -> None:
        """Count a token that became part of the output. Raises InvalidRequestError if it is negative."""
        if token_id < 0:
            raise InvalidRequestError(f"token ids must be >= 0, got {token_id}")
        if self.grammar is not None:
            self.grammar.record(token_id)
        if self.params.has_penalty:
            slot = self._slot(token_id)  # may replace the arrays, so before they are looked at
            self._counts[slot] += 1

    def seen(self) -> tuple[IntArray, IntArray]:
        """Distinct ids int64 [n] and how often each is in the output int64 [n] (0: in the prompt only).

        The prompt's ids are listed only for a repetition penalty. Views, valid until the next `record`.
        """
        return self._ids[: self._num_ids], self._counts[: self._num_ids]

    def fork(self, sample_index: int) -> SamplerState:
        """A copy for another branch: equal counts, nothing shared, and a generator of its own.

        With a seed the branch repeats: its generator follows from the seed and the indices of the forks.
        """
        twin = object.__new__(SamplerState)
        twin.params, twin.plain_greedy = self.params, self.plain_greedy
        twin.grammar = None if self.grammar is None else self.grammar.fork()
        twin._seed = np.random.SeedSequence(self._seed.entropy, spawn_key=(*self._seed.spawn_key, sample_index))
        twin._generator = np.random.Generator(np.random.PCG64(twin._seed))
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        twin._num_prompt, twin._num_ids = self._num_prompt, self._num_ids
        twin._slots = dict(self._slots)
        return twin

    def _slot(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = int(np.searchsorted(self._ids[: self._num_prompt], token_id))
            if slot == self._num_prompt or self._ids[slot] != token_id:
                slot = self._append(token_id)
            self._slots[token_id] = slot
        return slot

    def _append(self, token_id: int) -> int:
        slot = self._num_ids
        if slot == self._ids.size:
            spare = np.zeros(max(16, slot), dtype=np.int64)
            self._ids, self._counts = np.concatenate((self._ids, spare)), np.concatenate((self._counts, spare))
        self._ids[slot] = token_id
        self._num_ids += 1
        return slot


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The tokens of one step.

    Attributes:
        token_ids: int64 [B], -1 where the row failed.
        errors: why a row failed, by row; empty when all is well. A failed row's request should end with it.
    """

    token_ids: IntArray
    errors: dict[int, str] = field(default_factory=dict)


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> SampleResult:
    """One token for every row. Records nothing: call `record` for each token that joins its sequence.

    Args:
        logits: float32 [B, V]; not modified.
        states: one per row of logits.

    Raises:
        InvalidRequestError: logits is not float32 [len(states), V]. What is wrong with one row or its state
            (NaN, no finite logit, an exception) does not raise: it is that row's entry in `errors`.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.shape[0] != len(states):
        raise InvalidRequestError(
            f"logits must be float32 [{len(states)}, vocabulary], got {logits.dtype} {list(logits.shape)}"
        )
    logits = logits.detach()
    errors: dict[int, str] = {}
    token_ids = np.full(len(states), -1, dtype=np.int64)
    if _all_plain_greedy(states):
        _greedy(logits, token_ids, errors)
        return SampleResult(token_ids, errors)
    rows = _collect(states, errors)
    try:
        _sample_rows(logits, rows, token_ids, errors)
    except Exception:
        # Some row broke the arithmetic of all: find it by giving each its own pass, with the same draws.
        for row in rows:
            _sample_alone(logits, row, token_ids, errors)
    return SampleResult(token_ids, errors)


def _all_plain_greedy(states: Sequence[SamplerState]) -> bool:
    try:
        return all(state.plain_greedy for state in states)
    except Exception:
        return False  # the way round finds which


@dataclass(slots=True)
class _Row:
    """One row's options, read once, so that whatever is wrong with its state shows before rows are mixed."""

    index: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    uniform: float = 0.0
    filtered: bool = False
    allowed: npt.NDArray[np.bool_] | None = None
    bias: Mapping[int, float] | None = None
    penalty: tuple[float, float, float] | None = None
    ids: IntArray | None = None
    counts: IntArray | None = None


def _collect(states: Sequence[SamplerState], errors: dict[int, str]) -> list[_Row]:
    rows = (_read(index, state, errors) for index, state in enumerate(states))
    return [row for row in rows if row is not None]


def _read(index: int, state: SamplerState, errors: dict[int, str]) -> _Row | None:
    try:
        row, params = _Row(index), state.params
        row.bias = params.logit_bias
        row.allowed = None if state.grammar is None else state.grammar.allowed()
        if params.has_penalty:
            row.penalty = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            row.ids, row.counts = state.seen()
            if row.ids.shape != row.counts.shape:
                raise InvalidRequestError(f"{row.ids.shape} token ids have {row.counts.shape} counts")
        if not params.greedy:
            row.temperature = min(max(float(params.temperature), TEMPERATURE_MIN), TEMPERATURE_MAX)
            row.top_p, row.top_k, row.min_p = float(params.top_p), int(params.top_k), float(params.min_p)
            row.filtered = params.has_filter
            row.uniform = float(state.draw())
    except Exception as error:
        errors[index] = f"{type(error).__name__}: {error}"
        return None
    return row


def _greedy(logits: torch.Tensor, token_ids: IntArray, errors: dict[int, str]) -> None:
    # One pass finds the token (torch gives the first of equals) and, because NaN wins max, every bad row.
    if not len(token_ids):
        return
    best, arg = logits.max(dim=-1)
    token_ids[:] = arg.numpy()
    for index in np.flatnonzero(~np.isfinite(best.numpy())).tolist():
        token_ids[index] = -1
        errors[index] = _reason(float(best[index]))


def _sample_alone(logits: torch.Tensor, row: _Row, token_ids: IntArray, errors: dict[int, str]) -> None:
    try:
        _sample_rows(logits, [row], token_ids, errors)
    except Exception as error:
        token_ids[row.index] = -1
        errors[row.index] = f"{type(error).__name__}: {error}"


def _sample_rows(logits: torch.Tensor, rows: list[_Row], token_ids: IntArray, errors: dict[int, str]) -> None:
    """Sample `rows` of logits [B, V] into token_ids [B] and errors. Draws nothing, so it may be repeated."""
    if not rows:
        return
    own = logits
    if len(rows) < len(logits):
        own = logits[torch.tensor([row.index for row in rows])]
    masked = [(at, row.allowed) for at, row in enumerate(rows) if row.allowed is not None]
    if masked:
        own = own.clone()
        for at, allowed in masked:
            own[at, torch.from_numpy(~allowed)] = -math.inf
    biased = [(at, row.bias) for at, row in enumerate(rows) if row.bias]
    if biased:
        own = _add_bias(own, biased)
    penalised = [(at, row) for at, row in enumerate(rows) if row.penalty is not None]
    if penalised:
        own = _penalise(own, penalised)
    best, arg = own.max(dim=-1)
    largest, choice = best.tolist(), arg.tolist()
    plain: list[int] = []
    filtered: list[int] = []
    for at, row in enumerate(rows):
        if not math.isfinite(largest[at]):
            errors[row.index] = _reason(largest[at])
        elif row.temperature == 0.0:
            token_ids[row.index] = choice[at]
        else:
            (filtered if row.filtered else plain).append(at)
    step = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    for group in (plain, filtered):
        for start in range(0, len(group), step):
            part = group[start : start + step]
            chosen = [rows[at] for at in part]
            taken = own if len(part) == len(own) else own[part]
            tokens = _sample_chunk(taken, best[part], chosen)
            token_ids[[row.index for row in chosen]] = tokens.numpy()


def _sample_chunk(logits: torch.Tensor, best: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
    """Draw for rows that are all filtered or all not: logits float32 [n, V] -> ids int64 [n]."""
    temperature = torch.tensor([row.temperature for row in rows], dtype=torch.float32)
    # The largest becomes 0, so no temperature can overflow it.
    probs = torch.softmax((logits - best.unsqueeze(1)).div_(temperature.unsqueeze(1)), dim=-1)
    uniform = torch.tensor([row.uniform for row in rows], dtype=torch.float64)
    if not rows[0].filtered:
        return draw(probs, uniform)
    top_k = torch.tensor([row.top_k for row in rows])
    top_p = torch.tensor([row.top_p for row in rows], dtype=torch.float64)
    min_p = torch.tensor([row.min_p for row in rows], dtype=torch.float64)
    return draw_filtered(logits, probs, uniform, top_k, top_p, min_p)


def _reason(largest: float) -> str:
    if math.isnan(largest):
        return "the logits contain NaN"
    return "the logits contain +inf" if largest > 0 else "no logit is finite (all are -inf)"


def _add_bias(logits: torch.Tensor, biased: list[tuple[int, Mapping[int, float]]]) -> torch.Tensor:
    """A copy of logits float32 [n, V] with each row's bias added; ids outside the vocabulary count for nothing."""
    result = logits.clone()
    for at, bias in biased:
        ids = torch.tensor([token for token in bias if token < logits.shape[1]], dtype=torch.int64)
        result[at, ids] += torch.tensor([bias[token] for token in ids.tolist()], dtype=torch.float32)
    return result


def _penalise(logits: torch.Tensor, penalised: list[tuple[int, _Row]]) -> torch.Tensor:
    """A copy of logits float32 [n, V] with the penalties of the given rows (HF and vLLM's formulas)."""
    lengths = torch.tensor([len(row.ids) for _, row in penalised if row.ids is not None])
    row_of = torch.tensor([at for at, _ in penalised]).repeat_interleave(lengths)
    ids = torch.from_numpy(np.concatenate([row.ids for _, row in penalised if row.ids is not None]))
    counts = torch.from_numpy(np.concatenate([row.counts for _, row in penalised if row.counts is not None]))
    table = torch.tensor([row.penalty for _, row in penalised], dtype=torch.float32)
    repetition, frequency, presence = table.repeat_interleave(lengths, dim=0).unbind(1)
    values = logits[row_of, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    result = logits.clone()
    result[row_of, ids] = values
    return result
