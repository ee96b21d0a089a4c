"""LLM: prompts in, texts out, in the style of vLLM's offline API. A thin loop around `Engine`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from pagedkv.config import EngineConfig
from pagedkv.engine.allocators import Allocator
from pagedkv.engine.chat import Message, chat_tokens
from pagedkv.engine.engine import Engine
from pagedkv.engine.outputs import RequestOutput, StepOutput
from pagedkv.engine.params import SamplingParams
from pagedkv.errors import ConfigError, InvalidRequestError, QueueFullError

Prompt: TypeAlias = "str | Sequence[int]"

_SHORT_NAMES = {
    "kv_memory": "kv_cache_config.max_memory",
    "kv_dtype": "kv_cache_config.dtype",
    "page_size": "kv_cache_config.tokens_per_block",
    "enable_block_reuse": "kv_cache_config.enable_block_reuse",
    "capacity_scheduler_policy": "scheduler_config.capacity_scheduler_policy",
    "watermark": "scheduler_config.watermark",
    # vLLM's names for the same things
    "max_model_len": "max_seq_len",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_num_tokens",
    "block_size": "kv_cache_config.tokens_per_block",
    "kv_cache_memory_bytes": "kv_cache_config.max_memory",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "enable_prefix_caching": "kv_cache_config.enable_block_reuse",
}


class LLM:
    """A model that answers many prompts at once out of one page pool.

    Example::

        llm = LLM(kv_memory="256MiB")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

    Args:
        model: None for the embedded default model; a folder, a GGUF file or a Hugging Face id.
        config: all settings at once, instead of `model` and `settings`.
        report: called with a line before anything that takes long.
        allocator: "paged", or "contiguous" or "growing" to compare with.
        settings: any setting of `EngineConfig` (nested ones by their own short name, such as `kv_memory="256MiB"` or
            `page_size=32`), or vLLM's name for it (`max_model_len`, `max_num_seqs`, `block_size`, ...). The environment
            (PAGEDKV_...) counts where no setting is given.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        report: Callable[[str], None] | None = None,
        allocator: Allocator = "paged",
        **settings: Any,
    ) -> None:
        if config is None:
            flags = {_SHORT_NAMES.get(name, name): value for name, value in settings.items()}
            config = EngineConfig.load(overrides={"model": model, **flags}, environ=os.environ)
        elif model is not None or settings:
            raise ConfigError(f"give either config or settings, not both: {', '.join(settings) or 'model'}")
        self.engine = Engine.from_config(config, allocator=allocator, report=report)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (a transformers PreTrainedTokenizerBase)."""
        return self.engine.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[list[StepOutput]], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; results come in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all prompts, or one per prompt; None for the defaults.
            on_step: called with what each step added.

        Raises:
            InvalidRequestError, NeverFitsError: a prompt is wrong or can never fit; those before it are ended.
                A request that fails while it runs has finish_reason "error" instead.
        """
        batch = _as_batch(prompts)
        if params is None or isinstance(params, SamplingParams):
            each: Sequence[SamplingParams] = [params or SamplingParams()] * len(batch)
        else:
            each = list(params)
        if len(each) != len(batch):
            raise InvalidRequestError(f"{len(each)} sampling params for {len(batch)} prompts")
        place: dict[str, int] = {}
        results: list[RequestOutput | None] = [None] * len(batch)
        try:
            while len(place) < len(batch) or any(result is None for result in results):
                self._fill_queue(batch, each, place)
                pieces = self.engine.step()
                for piece in pieces:
                    if piece.result is not None and piece.request_id in place:
                        results[place[piece.request_id]] = piece.result
                if on_step is not None:
                    on_step(pieces)
        except BaseException:
            for request_id in place:
                self.engine.abort(request_id)
            raise
        return [result for result in results if result is not None]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[list[StepOutput]], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several. Messages are {"role": ..., "content": ...}."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([chat_tokens(self.tokenizer, each) for each in conversations], params, on_step=on_step)  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Continue one prompt, piece by piece. Leaving the loop early ends the request."""
        request_id = self.engine.add_request(prompt, params)
        try:
            while True:
                for piece in self.engine.step():
                    if piece.request_id == request_id:
                        yield piece
                        if piece.finished:
                            return
        finally:
            self.engine.abort(request_id)

    def _fill_queue(self, batch: list[Prompt], params: Sequence[SamplingParams], place: dict[str, int]) -> None:
        """Submit prompts until all are in or the queue is full."""
        while len(place) < len(batch):
            at = len(place)
            try:
                place[self.engine.add_request(batch[at], params[at])] = at
            except QueueFullError:
                return


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or many, as a list of prompts."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, np.integer))):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
