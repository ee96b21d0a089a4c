"""Engine: requests in, tokens out, one step at a time.

`step()` is schedule, forward, commit, sample, deliver. One thread owns an engine: model, kernels and manager are used
by nobody else. Whatever goes wrong with one request ends that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.budget import pages_for_tokens
from pagedkv.cache import NO_COPIES, KVCacheManager
from pagedkv.cache.checks import checked_ids
from pagedkv.config import EngineConfig
from pagedkv.engine.allocators import Allocator, make_manager
from pagedkv.engine.calls import LiveAnswer, LiveCall
from pagedkv.engine.detokenize import Detokenizer
from pagedkv.engine.grammar import Grammars, GrammarState
from pagedkv.engine.logprobs import TokenLogprobs, token_logprobs
from pagedkv.engine.observer import Guard
from pagedkv.engine.outputs import CompletionOutput, EngineStats, RequestOutput, StepOutput
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.pools import make_store
from pagedkv.engine.request import FinishReason, Request
from pagedkv.engine.runner import ModelRunner
from pagedkv.engine.sampler import SampleResult, SamplerState, sample
from pagedkv.engine.scheduler import Scheduler
from pagedkv.engine.step import Step
from pagedkv.engine.text import TextStream
from pagedkv.errors import ConfigError, InvalidRequestError
from pagedkv.models.loaded import LoadedModel


class Engine:
    """Serves requests on one model out of one page pool.

    Args:
        model: a model ready to run on pages.
        config: settings; None for the defaults.
        allocator: "paged"; or, as traditional systems do, "contiguous" to reserve max_seq_len per request, or
            "growing" to move requests that outgrow their room.
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
        self.store = make_store(model, self.config, self.max_seq_len)
        self.manager = make_manager(allocator, self.store.num_pages, self.config, self.max_seq_len)
        self.scheduler = Scheduler(self.manager, self.config)
        self.runner = ModelRunner(model, self.store)
        self._detokenizer = Detokenizer(model.tokenizer)
        self._grammars = Grammars(model.tokenizer, model.spec.vocab_size)
        self.watch = Guard()
        self._calls: dict[str, LiveCall] = {}
        self._live: dict[Request, LiveAnswer] = {}
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
        from pagedkv.models.load import load_model  # brings transformers: not for those who bring their model

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
            priority: under the PRIORITY policy, smaller goes first; under others it must be 0.

        Raises:
            InvalidRequestError: empty prompt, token ids (logit_bias has some too) outside the vocabulary, a
                priority that nobody heeds, or the id of a request that is live.
            NeverFitsError: prompt and max_tokens could not fit even if the engine were empty.
            QueueFullError: max_queue_size requests are waiting.
        """
        name = self._new_id() if request_id is None else request_id
        if name in self._calls:
            raise InvalidRequestError(f"request id {name!r} belongs to a request that has not ended")
        policy = self.config.scheduler_config.waiting_queue_policy
        if priority and policy != "PRIORITY":
            raise InvalidRequestError(f"priority is {priority}; waiting_queue_policy is {policy}, which heeds none")
        params = params or SamplingParams()
        ids = self._token_ids(prompt)
        self._check_vocabulary("token id of logit_bias", params.logit_bias or ())
        request = Request(name, ids, params, namespace, priority)
        self.scheduler.submit(request)
        try:
            call = LiveCall(name, prompt if isinstance(prompt, str) else None, params)
            self._add_answer(call, 0, request)
        except BaseException:
            self.scheduler.finish(request, FinishReason.ABORT)
            raise
        self._calls[name] = call
        self.watch.tell("queued", request)
        return name

    def _add_answer(self, call: LiveCall, index: int, request: Request) -> LiveAnswer:
        """Begin one answer of a call."""
        tokens = request.prompt.tolist()
        live = LiveAnswer(
            call,
            index,
            request,
            SamplerState(call.params, request.prompt.astype(np.int64), index, self._grammar(call.params)),
            TextStream(self._detokenizer, call.params, tokens),
        )
        call.live[index] = self._live[request] = live
        return live

    def _grammar(self, params: SamplingParams) -> GrammarState | None:
        if params.json_schema is not None:
            return self._grammars.of_schema(params.json_schema)
        return None if params.grammar is None else self._grammars.of_lark(params.grammar)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and give back what it holds; None if no such request is live."""
        call = self._calls.get(request_id)
        if call is None:
            return None
        result: RequestOutput | None = None
        for live in list(call.live.values()):
            _, result = self._end(live, FinishReason.ABORT)
        return result

    @property
    def has_unfinished(self) -> bool:
        """Is there anything left to do?"""
        return bool(self._calls)

    def step(self) -> list[StepOutput]:
        """Compute the next tokens of whoever's turn it is, and return what is new.

        If it fails as a whole, or is interrupted, the requests of this step end with an error; others go on.
        """
        step = self.scheduler.schedule()
        self.watch.tell("scheduled", step)
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
        self.watch.tell("stepped", step)
        return outputs

    def warm_up(self) -> None:
        """Run a tiny request, so that kernels are compiled before others come. If it is the first, nobody counts it."""
        first = not self._steps
        name = self.add_request([0], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        while name in self._calls:
            self.step()
        if first:
            self._steps = self._peak_running = self._computed = self._generated = 0
            self.scheduler.forget_counts()

    def set_limits(self, namespace: Hashable, *, floor: int = 0, ceiling: int | None = None) -> None:
        """How many pages a namespace is sure of, and how many it may use at most: `KVCacheManager.set_limits`.

        Raises:
            ConfigError, InvalidRequestError: as there; or the allocator is contiguous.
        """
        self.paged.set_limits(namespace, floor=floor, ceiling=ceiling)

    def resize(self, num_pages: int) -> int:
        """Give the pool another number of pages between two steps; requests go on. Returns how many it has then.

        These are more than asked for as long as requests, waiting ones included, need them.

        Raises:
            ConfigError: fewer pages than 1 or than all floors; or the allocator is contiguous.
            MemoryError: there is none for so many pages; nothing has changed.
        """
        manager = self.paged
        if num_pages < 1:
            raise ConfigError(f"a pool of {num_pages} pages; it must hold at least 1 page")
        if num_pages > manager.num_pages:
            self._resize_store(num_pages, NO_COPIES)
            manager.resize(num_pages)
        else:
            reach = (pages_for_tokens(live.request.most_kv_tokens, manager.page_size) for live in self._live.values())
            resized = manager.resize(max([num_pages, *reach]))
            self._resize_store(resized.num_pages, resized.copies)
        return manager.num_pages

    def _resize_store(self, num_pages: int, copies: NDArray[np.int32]) -> None:
        try:
            self.store.resize(num_pages, copies)
        except RuntimeError as error:  # torch's way to say so
            raise MemoryError(f"no memory for {num_pages} pages: {error}") from None

    @property
    def paged(self) -> KVCacheManager:
        """The manager, if it has pages to manage; ConfigError otherwise."""
        if not isinstance(self.manager, KVCacheManager):
            raise ConfigError("the allocator is contiguous: it has no pages to limit, resize, reset or show")
        return self.manager

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
        sampling = [self._live[r] for r, samples in zip(step.requests, step.samples.tolist(), strict=True) if samples]
        rows = list(range(len(sampling)))
        for row, live in enumerate(list(sampling)):
            if live.call.params.n > 1 and live.index == 0 and not live.request.sampled:
                branches = self._branch(live)
                sampling += branches
                rows += [row] * len(branches)
        if len(rows) > len(logits):
            logits = logits[rows]
        result = sample(logits, [live.sampler for live in sampling])
        logprobs = self._logprobs(logits, sampling, result)
        for index, (live, token) in enumerate(zip(sampling, result.token_ids.tolist(), strict=True)):
            if index in result.errors:
                outputs.append(self._fail(live.request, result.errors[index]))
            else:
                outputs.append(self._deliver(live, token, logprobs.get(index, ())))

    def _branch(self, live: LiveAnswer) -> list[LiveAnswer]:
        """The other answers of a call whose prompt has been computed; those that can share its pages right now."""
        request, call = live.request, live.call
        twins = [
            Request(request.id, request.prompt, call.params, request.namespace, request.priority, index=index)
            for index in range(1, call.params.n)
        ]
        begun = {twin: self._add_answer(call, index, twin) for index, twin in enumerate(twins, 1)}
        for twin in twins:
            self.watch.tell("queued", twin)
        return [begun[twin] for twin in self.scheduler.branch(request, twins)]

    def _logprobs(
        self, logits: torch.Tensor, sampling: list[LiveAnswer], result: SampleResult
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Log-probabilities of the sampled tokens, by row, for whoever asked."""
        rows = [
            row
            for row, live in enumerate(sampling)
            if live.call.params.logprobs is not None and row not in result.errors
        ]
        tokens = [int(result.token_ids[row]) for row in rows]
        counts = [sampling[row].call.params.logprobs or 0 for row in rows]
        return dict(zip(rows, ((found,) for found in token_logprobs(logits, rows, tokens, counts)), strict=True))

    def _deliver(self, live: LiveAnswer, token: int, logprobs: Sequence[TokenLogprobs]) -> StepOutput:
        """Add a sampled token to its request; end the request if this token ends it."""
        request, params = live.request, live.request.params
        try:
            live.sampler.record(token)
            request.sampled.append(token)
            live.logprobs += logprobs
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
            reason = FinishReason.STOP
        elif len(request.sampled) >= params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            return StepOutput(request.id, piece, [token], None, live.index, None, logprobs)
        piece += live.text.finish()
        if live.text.stop_reason is not None:  # the rest of the text may have completed it
            reason, live.stop_reason = FinishReason.STOP, live.text.stop_reason
        output, result = self._end(live, reason)
        return StepOutput(request.id, piece, [token], result, live.index, output, logprobs)

    def _fail(self, request: Request, error: BaseException | str) -> StepOutput:
        """End one answer with an error."""
        live = self._live[request]
        request.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        piece = live.text.finish()
        output, result = self._end(live, FinishReason.ERROR)
        return StepOutput(request.id, piece, [], result, live.index, output)

    def _fail_all(self, step: Step, error: BaseException) -> list[StepOutput]:
        """End what is left of a step that went wrong: nobody knows which of its tokens count.

        All answers of its calls end: some of them may have begun in this very step, and have no token to go on from.
        """
        calls = dict.fromkeys(self._live[request].call for request in step.requests if request in self._live)
        return [self._fail(live.request, error) for call in calls for live in list(call.live.values())]

    def _end(self, live: LiveAnswer, reason: FinishReason) -> tuple[CompletionOutput, RequestOutput | None]:
        """The one way out: the answer's pages are released. Returns it, and the whole call if it was the last one."""
        request, call = live.request, live.call
        self.scheduler.finish(request, reason)
        self.watch.tell("ended", request)
        del self._live[request], call.live[live.index]
        logprobs = None if call.params.logprobs is None else live.logprobs
        output = CompletionOutput(
            live.index, live.text.text, request.sampled, request.finish_reason, live.stop_reason, logprobs
        )
        call.ended[live.index] = output
        call.error = call.error or request.error
        if live.index == 0:
            call.cached_tokens = request.cached_tokens
        if call.live:
            return output, None
        del self._calls[call.id]
        result = RequestOutput(
            request_id=call.id,
            prompt=call.prompt,
            prompt_token_ids=request.prompt.tolist(),
            outputs=[call.ended[index] for index in sorted(call.ended)],
            num_cached_tokens=call.cached_tokens,
            error=call.error,
        )
        return output, result

    def _token_ids(self, prompt: str | Sequence[int]) -> NDArray[np.int32]:
        """The prompt as int32 ids, checked against the vocabulary."""
        ids = self.model.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        array = checked_ids(ids)
        if array.ndim != 1 or not array.size:
            raise InvalidRequestError("the prompt is empty; it needs at least one token")
        self._check_vocabulary("token id", (int(array.max()),))
        return array

    def _check_vocabulary(self, what: str, ids: Iterable[int]) -> None:
        size = self.model.spec.vocab_size
        for token in ids:
            if token >= size:
                raise InvalidRequestError(f"{what} {token} is outside the vocabulary of {size}")

    def _new_id(self) -> str:
        """An id that no live request has."""
        while True:
            self._unnamed += 1
            if f"request-{self._unnamed}" not in self._calls:
                return f"request-{self._unnamed}"
