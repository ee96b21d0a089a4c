"""What a client may ask of sampling and stopping: one frozen, validated value per request.

Responsible for the names, defaults and limits of a request's sampling options (the names are vLLM's).
Knows nothing about logits, tokenizers or torch, nor how long a sequence the engine holds: admission does.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType

from pagedkv.errors import InvalidRequestError

MAX_TOKENS_LIMIT = 2**31 - 1
TOKEN_ID_LIMIT = 2**31 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_N = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_LENGTH = 262_144
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when generation ends. Immutable; safe to share between requests.

    Args:
        temperature: 0 is greedy (largest logit, ties to the lowest id). Finite, >= 0.
        top_p: keep the smallest set of most probable tokens whose mass reaches this. In (0, 1]; 1 is off.
        top_k: keep this many most probable tokens. 0 or -1 is off.
        min_p: keep tokens with at least this fraction of the largest probability. In [0, 1]; 0 is off.
        seed: makes the request repeatable, signed 64 bits; None draws fresh entropy.
        repetition_penalty: divides (positive) or multiplies (negative) the logit of every token of the prompt
            and the output; > 0, 1 is off (CTRL, Keskar et al. 2019).
        presence_penalty: taken once from the logit of every token of the output; in [-2, 2].
        frequency_penalty: taken from a token's logit once per occurrence in the output; in [-2, 2].
        stop: one string or several that end generation; kept as a tuple. At most 16, of 1 to 1024 characters.
        stop_token_ids: ids that end generation; kept as a tuple. At most 256.
        max_tokens: most tokens to generate, >= 1.
        n: how many answers to one prompt, 1 to 128; they share its pages and are sampled independently.
        logprobs: also report the log-probability of each sampled token and of so many likeliest ones, 0 to 20, as the
            model gave them (before bias, penalties and temperature); None reports nothing.
        logit_bias: token id to what is added to its logit, -100 to 100; at most 1024 entries.
        json_schema: a JSON schema, as text, that the answer follows; at most 262144 characters.
        grammar: the same by a grammar in llguidance's Lark dialect; not together with `json_schema`.
        ignore_eos: go on after the model's end-of-sequence token.
        include_stop_str_in_output: leave the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidRequestError: a value has the wrong type or is outside its limits; the message names both.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int = 16
    n: int = 1
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    json_schema: str | None = None
    grammar: str | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # The same as `stop` and `stop_token_ids`, in the one type that readers need.
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False)
    stop_ids: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("temperature", _real("temperature", self.temperature, low=0.0))
        put("top_p", _real("top_p", self.top_p, low=0.0, high=1.0, open_low=True))
        put("min_p", _real("min_p", self.min_p, low=0.0, high=1.0))
        penalty = _real("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True)
        put("repetition_penalty", penalty)
        put("presence_penalty", _real("presence_penalty", self.presence_penalty, low=-2.0, high=2.0))
        put("frequency_penalty", _real("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0))
        put("top_k", _integer("top_k", self.top_k, -1, TOKEN_ID_LIMIT))
        put("max_tokens", _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT))
        put("n", _integer("n", self.n, 1, MAX_N))
        if self.logprobs is not None:
            put("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        put("logit_bias", _logit_bias(self.logit_bias))
        _check_grammar("json_schema", self.json_schema)
        _check_grammar("grammar", self.grammar)
        if self.json_schema is not None and self.grammar is not None:
            raise InvalidRequestError("give either json_schema or grammar, not both")
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, SEED_MIN, SEED_MAX))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, got {reprlib.repr(getattr(self, name))}")
        strings, ids = _stop_strings(self.stop), _stop_token_ids(self.stop_token_ids)
        put("stop", strings)
        put("stop_strings", strings)
        put("stop_token_ids", ids)
        put("stop_ids", frozenset(ids))

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken and no random number is drawn."""
        return self.temperature == 0.0

    @property
    def has_filter(self) -> bool:
        """Whether top_k, top_p or min_p can remove a token."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def has_penalty(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _real(name: str, value: object, low: float, high: float = math.inf, open_low: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequestError(f"{name} must be a number, got {reprlib.repr(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    inside = math.isfinite(number) and number <= high and (number > low if open_low else number >= low)
    if not inside:
        upper = f", {high:g}]" if math.isfinite(high) else ", inf)"
        lower = f"({low:g}" if open_low else f"[{low:g}"
        raise InvalidRequestError(f"{name} must be in {lower}{upper}, got {number!r}")
    return number


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be an integer, got {reprlib.repr(value)}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequestError(f"{name} must be an integer, got {reprlib.repr(value)}") from None
    if not low <= number <= high:
        # Past 4300 digits Python refuses to print an int at all.
        shown = str(number) if number.bit_length() <= 128 else f"{number.bit_length()} bits"
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {shown}")
    return number


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings: dict[str, None] = {}
    for text in (stop,) if isinstance(stop, str) else _bounded("stop", stop, MAX_STOP_STRINGS):
        if not isinstance(text, str):
            raise InvalidRequestError(f"stop must hold strings, got {reprlib.repr(text)}")
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            limit = f"1 to {MAX_STOP_LENGTH} characters"
            raise InvalidRequestError(f"a stop string must have {limit}, got {len(text)}")
        strings[text] = None
    return tuple(strings)


def _stop_token_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    checked = (
        _integer("stop_token_ids", i, 0, TOKEN_ID_LIMIT) for i in _bounded("stop_token_ids", ids, MAX_STOP_TOKEN_IDS)
    )
    return tuple(dict.fromkeys(checked))


def _logit_bias(bias: Mapping[int, float] | None) -> Mapping[int, float] | None:
    if not bias:
        return None
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(f"logit_bias must map token ids to numbers, got {reprlib.repr(bias)}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"logit_bias may hold at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
    return MappingProxyType(
        {
            _integer("a token id of logit_bias", token, 0, TOKEN_ID_LIMIT): _real("logit_bias", value, -100.0, 100.0)
            for token, value in bias.items()
        }
    )


def _check_grammar(name: str, text: str | None) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name} must be a text, got {reprlib.repr(text)}")
    if not 1 <= len(text) <= MAX_GRAMMAR_LENGTH:
        raise InvalidRequestError(f"{name} must have 1 to {MAX_GRAMMAR_LENGTH} characters, got {len(text)}")


def _bounded(name: str, values: object, limit: int) -> tuple[object, ...]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise InvalidRequestError(f"{name} must be a list, got {reprlib.repr(values)}")
    if len(values) > limit:
        raise InvalidRequestError(f"{name} may hold at most {limit} entries, got {len(values)}")
    return tuple(values)
