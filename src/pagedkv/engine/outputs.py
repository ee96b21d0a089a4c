"""What the engine gives back: pieces as they come, and the whole once a request has ended. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedkv.cache import Usage
from pagedkv.engine.logprobs import TokenLogprobs
from pagedkv.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated text.

    Attributes:
        text: without the stop string, unless the request asked to keep it.
        token_ids: all sampled ids, those behind `text` and the one that ended it.
        finish_reason: stop, length, abort or error; None while it runs.
        stop_reason: the stop string or stop token id that ended it, if one did.
        logprobs: of each sampled token, where the request asked for them.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: Sequence[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and what became of it.

    Attributes:
        prompt: the prompt's text, if it was given as text.
        num_cached_tokens: prompt tokens whose keys and values were found in the cache; None if it never ran.
        error: why it failed, with finish_reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step added to one request.

    Attributes:
        text: new text that no later token can change.
        token_ids: new token ids.
        result: the whole request, once the last of its answers has ended.
        index: which of the request's answers it belongs to.
        output: the whole answer, once it has ended.
        logprobs: of the new tokens, where the request asked for them.
    """

    request_id: str
    text: str
    token_ids: Sequence[int]
    result: RequestOutput | None = None
    index: int = 0
    output: CompletionOutput | None = None
    logprobs: Sequence[TokenLogprobs] = ()

    @property
    def finished(self) -> bool:
        """Has the request ended with this step?"""
        return self.result is not None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was made, and the state after its last step.

    Attributes:
        steps: steps that computed something.
        running, waiting: requests now.
        peak_running: most requests that one step computed or held.
        computed_tokens: tokens that went through the model.
        prompt_tokens: tokens of all prompts that have been admitted.
        cached_tokens: of these, found in the cache; a request's own pages after a preemption do not count.
        generated_tokens: tokens sampled.
        preemptions: how often a request lost its pages.
        usage: where the pages are.
    """

    steps: int
    running: int
    waiting: int
    peak_running: int
    computed_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    usage: Usage
