"""Scheduler: which tokens of which requests the next step computes, and who waits.

Decodes first, then chunks of prompts that are being prefilled, then new admissions, all within `max_num_tokens`. Knows
neither tensors nor a clock: a simulator runs this scheduler on the same manager in simulated time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from pagedkv.budget import pages_for_tokens
from pagedkv.cache import NO_COPIES, Admitted, CacheManager, Extended, Forked, KVCacheManager, Never, Sequence, Wait
from pagedkv.config import EngineConfig
from pagedkv.engine.request import FinishReason, Request, Status
from pagedkv.engine.step import Step
from pagedkv.engine.victims import Offer, fewest
from pagedkv.engine.waiting import WaitingQueue
from pagedkv.errors import InvalidRequestError, NeverFitsError, QueueFullError

_MOST_HELD = 32  # waiting requests looked at per step while the prefixes they share are being computed


class Scheduler:
    """Continuous batching with chunked prefill over a cache manager.

    submit -> [waiting] -> schedule admits -> [running] -> finish, from either state, through one path.
    """

    def __init__(self, manager: CacheManager, config: EngineConfig) -> None:
        self.manager = manager
        self.config = config
        self.policy = config.scheduler_config
        self.waiting = WaitingQueue(self._by_priority)
        self.running: list[Request] = []
        self.steps = 0
        self._arrivals = 0
        self.forget_counts()

    def forget_counts(self) -> None:
        """Count from nothing."""
        self.preemptions = 0
        self.prompt_tokens = 0  # of requests at their first admission
        self.cached_tokens = 0  # of these, found in the cache
        self.preempted_tokens = 0  # computed, and lost to preemptions
        self.recovered_tokens = 0  # of these, found in the cache when the request came back

    @property
    def _headroom(self) -> int:
        """Pages that are kept free when a request is admitted."""
        return int(np.ceil(self.policy.watermark * self.manager.num_pages))

    @property
    def _by_priority(self) -> bool:
        return self.policy.waiting_queue_policy == "PRIORITY"

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: the prompt is empty, or the namespace cannot be hashed.
            NeverFitsError: prompt and max_tokens exceed max_seq_len, the whole pool, or what its namespace may use.
            QueueFullError: max_queue_size requests are waiting already, or max_queue_tokens would be exceeded.
        """
        _check_request(request)
        self._check_size(request)
        self._check_queue(request)
        self._arrivals += 1
        request.arrival = self._arrivals
        self.waiting.add(request)

    def _check_size(self, request: Request) -> None:
        prompt, most = request.prompt.size, request.params.max_tokens
        if prompt + most > self.manager.max_seq_len:
            raise NeverFitsError(
                f"request {request.id!r}: {prompt} prompt tokens + max_tokens {most} = {prompt + most} tokens; "
                f"max_seq_len is {self.manager.max_seq_len}"
            )
        pages = pages_for_tokens(request.most_kv_tokens, self.manager.page_size)
        whole = self.manager.num_pages
        own = self.manager.capacity(request.namespace) if isinstance(self.manager, KVCacheManager) else whole
        if pages > own:
            limit = f"the whole pool has {whole}" if own == whole else f"its namespace may use {own} of {whole}"
            raise NeverFitsError(
                f"request {request.id!r}: {prompt} prompt tokens + max_tokens {most} need {pages} pages of "
                f"{self.manager.page_size} tokens; {limit}"
            )

    def _check_queue(self, request: Request) -> None:
        waiting, tokens, config = len(self.waiting), self.waiting.prompt_tokens, self.config
        if waiting >= config.max_queue_size:
            raise QueueFullError(f"{waiting} requests are waiting; max_queue_size is {config.max_queue_size}")
        if waiting and config.max_queue_tokens is not None and tokens + request.prompt.size > config.max_queue_tokens:
            raise QueueFullError(
                f"requests of {tokens} prompt tokens are waiting; {request.prompt.size} more would exceed "
                f"max_queue_tokens, {config.max_queue_tokens}"
            )

    def branch(self, request: Request, twins: list[Request]) -> list[Request]:
        """Let twins of a running request, which has computed its whole prompt, go on from where it is.

        They share its pages as far as there are rows and pages for it; the others wait, and will find its prompt
        cached. Neither counts as a hit: it is the request's own work.

        Returns:
            The twins that run now.
        """
        for twin in twins:
            self._arrivals += 1
            twin.arrival, twin.cached_tokens = self._arrivals, 0
        room = self.config.max_batch_size - len(self.running)
        started: list[Request] = []
        for twin in twins:
            forked = self._fork(request) if len(started) < room else None
            if forked is None:
                self.waiting.add(twin)
                continue
            twin.context, twin.computed, twin.reserved = request.context, request.computed, request.reserved
            twin.status, twin.sequence, twin.last_step = Status.RUNNING, forked, request.last_step
            self.running.append(twin)
            started.append(twin)
        return started

    def _fork(self, request: Request) -> Sequence | None:
        """A row that shares all pages of the request's; None if the manager cannot make one now."""
        if not isinstance(self.manager, KVCacheManager):
            return None
        reserve = max(0, request.most_kv_tokens - request.computed) if request.reserved else 0
        answer = self.manager.fork(request.row, reserve=reserve)
        return answer.sequences[0] if isinstance(answer, Forked) else None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, wherever it is, and give back what it holds. Ending it again changes nothing."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self._stop_running(request)
        request.status = Status.FINISHED
        request.finish_reason = reason

    def schedule(self) -> Step:
        """Choose the next step's tokens and give each its place. An empty step means that nothing is left to do."""
        self.steps += 1
        decodes, preempted, moved = self._extend_decodes()
        budget = self.config.max_num_tokens - len(decodes)
        chunks = self._continue_prefills(budget)
        admitted, copies = self._admit(budget - sum(count for _, count in chunks))
        # One list: what an earlier call copies to is not indexed yet, so no later call copies from it.
        return self._step(decodes, chunks + admitted, preempted, np.concatenate((moved, copies)))

    def commit(self, step: Step) -> None:
        """Keys and values of the step's tokens have been computed."""
        self.manager.commit(step.rows, step.counts)
        for request, count in zip(step.requests, step.counts.tolist(), strict=True):
            request.computed += count

    def _extend_decodes(self) -> tuple[list[Request], list[Request], NDArray[np.int32]]:
        """A place for one more token of each decoding request, preempting others if pages run out.

        Returns the requests that decode, those that were preempted, and the page copies that the places take.

        While prompts want tokens too, a share of the step is kept for them; decodes then take turns.
        """
        decodes = [request for request in self.running if not request.prefilling]
        most = self.config.max_num_tokens
        if len(self.waiting) or len(decodes) < len(self.running):
            most -= max(1, min(self.manager.page_size, most // 2))
        if len(decodes) > most:
            decodes = sorted(decodes, key=lambda request: request.last_step)[:most]
        decodes.sort(key=lambda request: request.row)
        preempted: list[Request] = []
        copies = NO_COPIES
        while decodes:
            outcome = self.manager.extend([r.row for r in decodes], [r.sampled[-1] for r in decodes])
            if isinstance(outcome, Extended):
                copies = outcome.copies
                break
            if isinstance(outcome, Never):
                raise AssertionError(f"a running request outgrew the pool: {outcome}")
            among = self._concerned(outcome)
            victims = self._victims(outcome.needed - outcome.free, decodes, among)
            if not victims:  # all others run on pages set aside for them: wait until one of them ends
                growing = {r for r in decodes if r in among and self._grows(r)}
                unsure = {r for r in growing if not r.reserved}
                decodes = [r for r in decodes if r not in (unsure or growing)]
                continue
            for victim in victims:
                self._preempt(victim)
            preempted += victims
            decodes = [request for request in decodes if request.status is Status.RUNNING]
        return decodes, preempted, copies

    def _concerned(self, outcome: Wait) -> dict[Request, None]:
        """The running requests that compete for what is short: those of one namespace, or all."""
        own = outcome.on == "ceiling"
        return dict.fromkeys(r for r in self.running if not own or r.namespace == outcome.namespace)

    def _victims(self, shortage: int, decodes: list[Request], among: Iterable[Request]) -> list[Request]:
        """The fewest, cheapest of these requests that make up for the shortage.

        A victim's cost is what it has to compute again: the pages that nobody shares. It brings these, and the page
        that it would have taken itself. The oldest request and those with a reservation go on, hence all of them end.
        """
        candidates = sorted((r for r in among if not r.reserved), key=self._rank)[1:]
        costs = self.manager.private_pages([r.row for r in candidates]).tolist()
        growing = {r for r in decodes if self._grows(r)}
        offers = [Offer(r, cost, cost + (r in growing)) for r, cost in zip(candidates, costs, strict=True)]
        if not any(offer.gain for offer in offers):  # they share all pages; each that goes makes the rest more private
            return candidates[-1:]
        return fewest(offers, shortage, lambda request: self._rank(request)[0])

    def _grows(self, request: Request) -> bool:
        """Does the request's next token take a page: the first of a page, or one in a page that others share?"""
        shares = isinstance(self.manager, KVCacheManager) and bool(self.manager.shares_tail[request.row])
        return shares or request.computed % self.manager.page_size == 0

    def _rank(self, request: Request) -> tuple[int, int]:
        """Who is to be served first among the running: by priority if that is the policy, then by arrival."""
        return (request.priority if self._by_priority else 0, request.arrival)

    def _preempt(self, request: Request) -> None:
        """Take a request's pages; it waits again and will compute them anew, save what is still cached then."""
        self._stop_running(request)
        request.status = Status.WAITING
        self.preempted_tokens += request.computed
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.add(request)

    def _stop_running(self, request: Request) -> None:
        """The one way out of the running requests: its row and pages are released."""
        self.running.remove(request)
        if request.sequence is not None:
            self.manager.release([request.sequence])
        request.sequence = None

    def _continue_prefills(self, budget: int) -> list[tuple[Request, int]]:
        """Next chunks of the prompts that are being computed, oldest first."""
        chunks: list[tuple[Request, int]] = []
        for request in self.running:
            if request.prefilling and budget:
                count = self._chunk(request, budget)
                chunks.append((request, count))
                budget -= count
        return chunks

    def _admit(self, budget: int) -> tuple[list[tuple[Request, int]], NDArray[np.int32]]:
        """Admit waiting requests in order while there are tokens, rows and pages for them.

        Returns their first chunks, and the page copies that they begin with.

        A request whose next prefix page is being computed by another is passed over, so that a burst of equal prompts
        computes its prefix once; and so is one whose namespace uses all that it may, as far as others are near.
        """
        chunks: list[tuple[Request, int]] = []
        copies = [NO_COPIES]
        held = 0
        blocked = False  # somebody waits for pages: only who is sure of his goes before him
        owed: dict[Hashable, int] = {}
        for request in self.waiting:
            if not budget or held >= _MOST_HELD or len(self.running) >= self.config.max_batch_size:
                break
            sure = self._is_sure(request, owed)
            if blocked and not sure:
                continue
            outcome = self._try_admit(request, 0 if sure or not self.running else self._headroom)
            request.wait = outcome if isinstance(outcome, Wait) else None
            if isinstance(outcome, Wait) and outcome.on in ("prefix", "ceiling"):
                held += 1
                continue
            if isinstance(outcome, Wait):
                if outcome.on == "rows" or not self._floors:
                    break
                blocked = True
                continue
            self._start(request, outcome)
            owed.clear()
            copies.append(outcome.copies)
            count = self._chunk(request, budget)
            chunks.append((request, count))
            budget -= count
        return chunks, np.concatenate(copies)

    @property
    def _floors(self) -> bool:
        """Is any namespace sure of pages?"""
        return isinstance(self.manager, KVCacheManager) and self.manager.tenants.floors > 0

    def _is_sure(self, request: Request, owed: dict[Hashable, int]) -> bool:
        """Does its namespace's floor hold pages for all its known tokens? `owed` keeps what was asked by namespace."""
        if not self._floors or not isinstance(self.manager, KVCacheManager):
            return False
        name = request.namespace
        if name not in owed:
            owed[name] = self.manager.owed(name)
        return pages_for_tokens(request.known_tokens, self.manager.page_size) <= owed[name]

    def _try_admit(self, request: Request, headroom: int) -> Admitted | Wait:
        """Ask the manager for a row and pages for all known tokens, with a reservation where the policy wants one."""
        request.context = request.known()
        guaranteed = self.policy.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
        request.reserved = guaranteed or request.preemptions >= self.policy.max_preemptions
        outcome = self.manager.admit(
            request.context,
            namespace=request.namespace,
            reserve=max(0, request.most_kv_tokens - request.context.size) if request.reserved else 0,
            headroom=headroom,
            owner=request.id,
            share_pending=True,
        )
        if isinstance(outcome, Never):
            raise AssertionError(f"request {request.id!r} passed submission but can never be admitted: {outcome}")
        return outcome

    def _start(self, request: Request, admitted: Admitted) -> None:
        """Move an admitted request from the waiting to the running ones."""
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        request.sequence = admitted.sequence
        request.computed = admitted.cached_tokens
        if request.cached_tokens is None:  # what it finds after a preemption is its own work, not a hit
            request.cached_tokens = admitted.cached_tokens
            self.prompt_tokens += request.prompt.size
            self.cached_tokens += admitted.cached_tokens
        elif request.preemptions:
            self.recovered_tokens += admitted.cached_tokens

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens of its next chunk. All chunks but the last end with a page, unless that would make one empty."""
        rest = request.context.size - request.computed
        if rest <= budget:
            return rest
        aligned = budget - (request.computed + budget) % self.manager.page_size
        return aligned if aligned > 0 else budget

    def _step(
        self,
        decodes: list[Request],
        chunks: list[tuple[Request, int]],
        preempted: list[Request],
        copies: NDArray[np.int32],
    ) -> Step:
        """The flat arrays of a step."""
        requests = decodes + [request for request, _ in chunks]
        counts = [1] * len(decodes) + [count for _, count in chunks]
        for request in requests:
            request.last_step = self.steps
        parts = [np.array([request.sampled[-1] for request in decodes], np.int32)]
        parts += [request.context[request.computed : request.computed + count] for request, count in chunks]
        return Step(
            requests=requests,
            tokens=np.concatenate(parts),
            rows=np.array([request.row for request in requests], np.int64),
            starts=np.array([request.computed for request in requests], np.int64),
            counts=np.array(counts, np.int64),
            samples=np.array(
                [r.computed + n == r.known_tokens for r, n in zip(requests, counts, strict=True)], np.bool_
            ),
            preempted=preempted,
            copies=copies,
        )


def _check_request(request: Request) -> None:
    """What is wrong with a request whatever the pool."""
    if not request.prompt.size:
        raise InvalidRequestError(f"the prompt of request {request.id!r} is empty; it needs at least one token")
    try:
        hash(request.namespace)
    except TypeError:
        kind = type(request.namespace).__name__
        raise InvalidRequestError(f"request {request.id!r}: a namespace of type {kind} cannot be hashed") from None
