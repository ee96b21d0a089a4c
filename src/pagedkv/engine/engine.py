"""Engine: requests in, tokens out, one step at a time.

`step()` is schedule, forward, commit, sample, deliver. One thread owns an engine: model, kernels and manager are used
by nobody else. Whatever goes wrong with one request ends that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.attention.cpu.backend import CpuBackend
from pagedkv.budget import kv_tokens
from pagedkv.cache import CacheManager, ContiguousManager, KVCacheManager
from pagedkv.cache.checks import checked_ids
from pagedkv.config import EngineConfig
from pagedkv.engine.detokenize import Detokenizer
from pagedkv.engine.outputs import CompletionOutput, EngineStats, RequestOutput, StepOutput
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.request import FinishReason, Request
from pagedkv.engine.runner import ModelRunner
from pagedkv.engine.sampler import SamplerState, sample
from pagedkv.engine.scheduler import Scheduler, Step
from pagedkv.engine.text import TextStream
from pagedkv.errors import ConfigError, InvalidRequestError
from pagedkv.models.load import load_model
from pagedkv.models.loaded import LoadedModel
from pagedkv.store.pages import PageStore

Allocator = Literal["paged", "contiguous"]


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has not ended, and what is kept for it outside the scheduler."""

    request: Request
    prompt: str | None
    sampler: SamplerState
    text: TextStream
    stop_reason: str | int | None = None


class Engine:
    """Serves requests on one model out of one page pool.

    Args:
        model: a model ready to run on pages.
        config: settings; None for the defaults.
        allocator: "paged", or "contiguous" to reserve max_seq_len per request as traditional systems do.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig | None = None, *, allocator: Allocator = "paged"
    ) -> None:
        self.config = config or EngineConfig()
        self.model = model
        self.max_seq_len = self.config.max_seq_len or model.spec.max_seq_len
        if self.max_seq_len > model.spec.max_seq_len:
            raise ConfigError(
                f"max_seq_len is {self.max_seq_len}; model {model.name!r} was made for {model.spec.max_seq_len}"
            )
        self.store = _make_store(model, self.config, self.max_seq_len)
        self.manager = _make_manager(self.store.num_pages, self.config, self.max_seq_len, allocator)
        self.scheduler = Scheduler(self.manager, self.config)
        self.runner = ModelRunner(model, self.store)
        self._detokenizer = Detokenizer(model.tokenizer)
        self._live: dict[str, _Live] = {}
        self._unnamed = 0
        self._steps = self._peak_running = self._computed = 0
        self._generated = 0

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        allocator: Allocator = "paged",
        report: Callable[[str], None] | None = None,
    ) -> Engine:
        """Load the configured model and make an engine for it. `report` gets a line before anything that takes long."""
        model = load_model(config.model, dtype=config.dtype, report=report)
        return cls(model, config, allocator=allocator)

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: Hashable = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt, as text or as token ids, and return its id.

        Args:
            namespace: pages are shared only between requests of one namespace (a tenant's salt).
            priority: under the PRIORITY policy, smaller goes first.

        Raises:
            InvalidRequestError: empty prompt, token ids outside the vocabulary, or the id of a request that is live.
            NeverFitsError: prompt and max_tokens could not fit even if the engine were empty.
            QueueFullError: max_queue_size requests are waiting.
        """
        name = self._new_id() if request_id is None else request_id
        if name in self._live:
            raise InvalidRequestError(f"request id {name!r} belongs to a request that has not ended")
        params = params or SamplingParams()
        ids = self._token_ids(prompt)
        request = Request(name, ids, params, namespace, priority)
        live = _Live(
            request,
            prompt if isinstance(prompt, str) else None,
            SamplerState(params, ids.astype(np.int64)),
            TextStream(self._detokenizer, params, ids.tolist()),
        )
        self.scheduler.submit(request)
        self._live[name] = live
        return name

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and give back what it holds; None if no such request is live."""
        live = self._live.get(request_id)
        return None if live is None else self._end(live, FinishReason.ABORT)

    @property
    def has_unfinished(self) -> bool:
        """Is there anything left to do?"""
        return bool(self._live)

    def step(self) -> list[StepOutput]:
        """Compute the next tokens of whoever's turn it is, and return what is new.

        If it fails as a whole, or is interrupted, the requests of this step end with an error; others go on.
        """
        step = self.scheduler.schedule()
        if not step.requests:
            return []
        self._steps += 1
        self._computed += step.tokens.size
        self._peak_running = max(self._peak_running, len(self.scheduler.running))
        outputs: list[StepOutput] = []
        try:
            logits = self.runner.logits(step, self.manager.table)
            self.scheduler.commit(step)
            self._sample(step, logits, outputs)
        except Exception as error:
            outputs += self._fail_all(step, error)
        except BaseException as interrupt:
            self._fail_all(step, interrupt)
            raise
        return outputs

    def warm_up(self) -> None:
        """Run a tiny request, so that kernels are compiled before the first real one comes."""
        name = self.add_request([0], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        while name in self._live:
            self.step()

    def stats(self) -> EngineStats:
        """Counters, and where the pages are now."""
        return EngineStats(
            steps=self._steps,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            peak_running=self._peak_running,
            computed_tokens=self._computed,
            prompt_tokens=self.scheduler.prompt_tokens,
            cached_tokens=self.scheduler.cached_tokens,
            generated_tokens=self._generated,
            preemptions=self.scheduler.preemptions,
            usage=self.manager.usage(),
        )

    def _sample(self, step: Step, logits: torch.Tensor, outputs: list[StepOutput]) -> None:
        """Sample the next token of each request that has computed all it knows, and deliver it to `outputs`."""
        sampling = [
            self._live[r.id] for r, samples in zip(step.requests, step.samples.tolist(), strict=True) if samples
        ]
        result = sample(logits, [live.sampler for live in sampling])
        for index, (live, token) in enumerate(zip(sampling, result.token_ids.tolist(), strict=True)):
            if index in result.errors:
                outputs.append(self._fail(live.request, result.errors[index]))
            else:
                outputs.append(self._deliver(live, token))

    def _deliver(self, live: _Live, token: int) -> StepOutput:
        """Add a sampled token to its request; end the request if this token ends it."""
        request, params = live.request, live.request.params
        try:
            live.sampler.record(token)
            request.sampled.append(token)
            self._generated += 1
            stops = token in params.stop_ids
            ends = stops or (not params.ignore_eos and token in self.model.eos_token_ids)
            shown = not ends or (stops and params.include_stop_str_in_output)
            piece = live.text.append([token]) if shown else ""
        except Exception as error:
            return self._fail(request, error)
        reason = None
        if ends:
            reason, live.stop_reason = FinishReason.STOP, token if stops else None
        elif live.text.finished:
            reason, live.stop_reason = FinishReason.STOP, live.text.stop_reason
        elif len(request.sampled) >= params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            return StepOutput(request.id, piece, [token])
        piece += live.text.finish()
        return StepOutput(request.id, piece, [token], self._end(live, reason))

    def _fail(self, request: Request, error: BaseException | str) -> StepOutput:
        """End one request with an error."""
        live = self._live[request.id]
        request.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return StepOutput(request.id, live.text.finish(), [], self._end(live, FinishReason.ERROR))

    def _fail_all(self, step: Step, error: BaseException) -> list[StepOutput]:
        """End what is left of a step that went wrong: nobody knows which of its tokens count."""
        return [self._fail(request, error) for request in step.requests if request.id in self._live]

    def _end(self, live: _Live, reason: FinishReason) -> RequestOutput:
        """The one way out: the request's pages are released and its result is made."""
        request = live.request
        self.scheduler.finish(request, reason)
        del self._live[request.id]
        output = CompletionOutput(0, live.text.text, request.sampled, request.finish_reason, live.stop_reason)
        return RequestOutput(
            request_id=request.id,
            prompt=live.prompt,
            prompt_token_ids=request.prompt.tolist(),
            outputs=[output],
            num_cached_tokens=request.cached_tokens,
            error=request.error,
        )

    def _token_ids(self, prompt: str | Sequence[int]) -> NDArray[np.int32]:
        """The prompt as int32 ids, checked against the vocabulary."""
        ids = self.model.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        array = checked_ids(ids)
        if array.ndim != 1 or not array.size:
            raise InvalidRequestError("the prompt is empty; it needs at least one token")
        if array.max() >= self.model.spec.vocab_size:
            raise InvalidRequestError(
                f"token id {array.max()} is outside the vocabulary of {self.model.spec.vocab_size}"
            )
        return array

    def _new_id(self) -> str:
        """An id that no live request has."""
        while True:
            self._unnamed += 1
            if f"request-{self._unnamed}" not in self._live:
                return f"request-{self._unnamed}"


def _make_store(model: LoadedModel, config: EngineConfig, max_seq_len: int) -> PageStore:
    """The page tensors that the configured budget pays for; one request of max_seq_len tokens must fit."""
    cache = config.kv_cache_config
    dtype = torch.bfloat16 if cache.dtype == "auto" else getattr(torch, cache.dtype)
    name = str(dtype).removeprefix("torch.")
    pages = cache.num_pages(model.spec, name, min_tokens=kv_tokens(max_seq_len - 1, 1))
    return PageStore(model.spec, CpuBackend(), pages, cache.page_size, dtype)


def _make_manager(num_pages: int, config: EngineConfig, max_seq_len: int, allocator: Allocator) -> CacheManager:
    """The allocator, paged or contiguous."""
    page_size, rows = config.kv_cache_config.page_size, config.max_batch_size
    if allocator == "contiguous":
        return ContiguousManager(num_pages, page_size, max_rows=rows, max_seq_len=max_seq_len)
    return KVCacheManager(
        num_pages,
        page_size,
        max_rows=rows,
        max_seq_len=max_seq_len,
        prefix_caching=config.kv_cache_config.enable_block_reuse,
        partial_reuse=config.kv_cache_config.enable_partial_reuse,
    )
