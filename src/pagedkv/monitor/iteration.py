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
    missed = sum(monitor.misses.tokens.values()) // figures.page_size
    new = monitor.feed.count(EventKind.ALLOCATED)
    running = [request for request in step.requests if request in scheduler.running]
    context = [(request, count) for request, count in zip(step.requests, step.counts.tolist(), strict=True)]
    chunks = [count for request, count in context if request in running and count > 1]
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
            "numScheduledRequests": len(running),
            "numContextRequests": len(chunks),
            "numGenRequests": len(running) - len(chunks),
            "numPausedRequests": sum(request.preemptions > 0 for request in scheduler.waiting),
            "numCtxTokens": sum(chunks),
        },
    }
