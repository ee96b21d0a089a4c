"""What callers have asked the engine for, as long as it has not ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedkv.engine.logprobs import TokenLogprobs
from pagedkv.engine.outputs import CompletionOutput
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.request import Request
from pagedkv.engine.sampler import SamplerState
from pagedkv.engine.text import TextStream


@dataclass(slots=True, eq=False)
class LiveAnswer:
    """An answer that has not ended, and what is kept for it outside the scheduler."""

    call: LiveCall
    index: int
    request: Request
    sampler: SamplerState
    text: TextStream
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class LiveCall:
    """What a caller has asked for: one prompt, and an answer or several."""

    id: str
    prompt: str | None
    params: SamplingParams
    live: dict[int, LiveAnswer] = field(default_factory=dict)
    ended: dict[int, CompletionOutput] = field(default_factory=dict)
    cached_tokens: int | None = None
    error: str | None = None
