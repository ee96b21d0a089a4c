"""The statistics of the last iteration, as TensorRT-LLM's /iteration_stats writes them."""

from __future__ import annotations

from typing import Any

from pagedkv.cache import EventKind
from pagedkv.monitor.monitor import Monitor


def iteration_stats(monitor: Monitor) -> dict[str, Any]:
    """kvCacheStats and inflightBatchingStats now; counts of blocks are since the engine was made."""
    monitor.refresh()
    figures, scheduler, step = monitor.figures(), monitor.engine.scheduler, monitor.last_step
    reused = scheduler.cached_tokens // figures.page_size
    tokens = monitor.misses.tokens
    missed = (sum(tokens.values()) - tokens["too_short"]) // figures.page_size  # what fills no page is no block
    new = monitor.feed.count(EventKind.ALLOCATED)
    running = set(scheduler.running)
    counts = [n for request, n in zip(step.requests, step.counts.tolist(), strict=True) if request in running]
    chunks = [count for count in counts if count > 1]
    return {
        "iter": monitor.engine.stats().steps,
        "numActiveRequests": figures.running,
        "numQueuedRequests": figures.waiting,
        "kvCacheStats": {
            "maxNumBlocks": figures.total,
            "freeNumBlocks": figures.free + figures.cached,
            "usedNumBlocks": figures.used,
            "tokensPerBlock": figures.page_size,
            "allocTotalBlocks": new + monitor.feed.count(EventKind.SHARED),
            "allocNewBlocks": new,
            "reusedBlocks": reused,
            "missedBlocks": missed,
            "cacheHitRate": reused / (reused + missed) if reused + missed else 0.0,
        },
        "inflightBatchingStats": {
            "numScheduledRequests": len(counts),
            "numContextRequests": len(chunks),
            "numGenRequests": len(counts) - len(chunks),
            "numPausedRequests": sum(request.preemptions > 0 for request in scheduler.waiting),
            "numCtxTokens": sum(chunks),
        },
    }
