"""Runs one workload through one engine and measures what the demonstration compares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagedkv.demo.workload import Chat
from pagedkv.engine.allocators import Allocator
from pagedkv.engine.engine import Engine
from pagedkv.engine.outputs import EngineStats, RequestOutput
from pagedkv.engine.params import SamplingParams


@dataclass(slots=True)
class Run:
    """One allocator's run, while it goes on and when it is over.

    Attributes:
        total: requests of the workload.
        page_bytes: bytes of one page over all layers.
        finished: results so far, by request id, in order of completion.
        seconds: time since the first step.
        output_tokens: tokens sampled so far.
        most_saved: most pages that sharing saved at one moment.
        reserved_slots, empty_slots: summed over steps, slots of used pages and those of them without a token.
        stats: the engine's own, after the last step.
    """

    allocator: Allocator
    total: int
    page_bytes: int
    finished: dict[str, RequestOutput] = field(default_factory=dict)
    seconds: float = 0.0
    output_tokens: int = 0
    most_saved: int = 0
    reserved_slots: int = 0
    empty_slots: int = 0
    stats: EngineStats | None = None

    @property
    def waste(self) -> float:
        """Share of the reserved memory that held no token, over the whole run."""
        return self.empty_slots / self.reserved_slots if self.reserved_slots else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of the run so far."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def errors(self) -> list[str]:
        """What went wrong with requests that did not end well."""
        return [result.error for result in self.finished.values() if result.error]


def run_chats(
    engine: Engine,
    allocator: Allocator,
    chats: Sequence[Chat],
    prompts: Sequence[Sequence[int]],
    on_step: Callable[[Run], None],
) -> Run:
    """Submit all chats at once, step until all have ended, greedily; `on_step` sees the run after every step.

    A small model repeats itself without the usual penalty of 1.1.
    """
    run = Run(allocator, len(chats), engine.store.nbytes // (engine.store.num_pages + 1))
    for number, (chat, prompt) in enumerate(zip(chats, prompts, strict=True)):
        params = SamplingParams(temperature=0, repetition_penalty=1.1, max_tokens=chat.max_tokens)
        engine.add_request(prompt, params, request_id=f"chat-{number}")
    start = time.perf_counter()
    while engine.has_unfinished:
        for piece in engine.step():
            run.output_tokens += len(piece.token_ids)
            if piece.result is not None:
                run.finished[piece.request_id] = piece.result
        run.seconds = time.perf_counter() - start
        run.stats = engine.stats()
        usage = run.stats.usage
        run.most_saved = max(run.most_saved, usage.saved)
        run.reserved_slots += usage.used * usage.page_size
        run.empty_slots += usage.used * usage.page_size - usage.tokens
        on_step(run)
    return run
