"""Request: one prompt on its way through the engine, and what it has to show for it.

Holds tokens and states; knows nothing about text, tensors, pages or time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from pagedkv.budget import kv_tokens
from pagedkv.cache import Sequence, Wait
from pagedkv.engine.params import SamplingParams


class Status(Enum):
    """Where a request is. A preempted one is waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(str, Enum):
    """Why a request ended: OpenAI's words, and two of our own."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what became of it.

    ::

        known      [ prompt ............... | sampled .... ]      known_tokens
        computed   [ ================== ]                         keys and values in pages
                                         ^ a decode step computes the one token that is known but not computed

    Attributes:
        id: the caller's name for it.
        prompt: token ids, int32 [n].
        params: how to sample and when to stop.
        namespace: prefixes are shared only within it.
        priority: under the PRIORITY policy, smaller goes first.
        arrival: number in order of submission.
        sampled: token ids generated so far.
        sequence: its row in the page table while it runs.
        context: all tokens known when it was admitted last, int32; what prefill computes.
        computed: tokens whose keys and values are in pages.
        cached_tokens: prompt tokens that the first admission found cached.
        preemptions: how often it has lost its pages.
        reserved: whether all its pages were set aside when it was admitted, so that it is never preempted.
        last_step: number of the last step that computed tokens of it.
        wait: while it waits, why it was not admitted when it was last considered; None if it was not its turn yet.
        index: which of the answers to its prompt it is.
    """

    id: str
    prompt: NDArray[np.int32]
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace: Hashable = None
    priority: int = 0
    arrival: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    sampled: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    context: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    computed: int = 0
    cached_tokens: int | None = None
    preemptions: int = 0
    reserved: bool = False
    last_step: int = 0
    wait: Wait | None = None
    index: int = 0

    @property
    def waits_on(self) -> str:
        """What a waiting request waits for: "pages", "rows", "prefix", "ceiling", or its "turn"."""
        return "turn" if self.wait is None else self.wait.on

    @property
    def row(self) -> int:
        """Row in the page table; only a running request has one."""
        if self.sequence is None:
            raise RuntimeError(f"request {self.id!r} is {self.status.value} and has no row")
        return self.sequence.row

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return self.prompt.size + len(self.sampled)

    @property
    def most_kv_tokens(self) -> int:
        """Most tokens whose keys and values it will ever store."""
        return kv_tokens(self.prompt.size, self.params.max_tokens)

    @property
    def prefilling(self) -> bool:
        """Are there tokens left to compute of those known at admission?"""
        return self.computed < self.context.size

    def known(self) -> NDArray[np.int32]:
        """Token ids of the prompt and of the output so far, int32 [known_tokens]."""
        return np.concatenate((self.prompt, np.array(self.sampled, np.int32)))
