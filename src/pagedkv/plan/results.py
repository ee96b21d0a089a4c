"""What a simulated run has come to: times by request, the pool over time, and the figures of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache import Usage

SERIES = ("seconds", "running", "waiting", "used", "cached", "free", "empty_slots", "used_slots", "saved")


class Samples:
    """The pool after every step, in arrays that grow."""

    def __init__(self) -> None:
        self._rows = np.zeros((1024, len(SERIES)))
        self._count = 0

    def add(self, now: float, running: int, waiting: int, usage: Usage) -> None:
        """Keep one moment."""
        if self._count == len(self._rows):
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)))
        slots = usage.used * usage.page_size
        empty = slots - usage.tokens
        self._rows[self._count] = (
            now, running, waiting, usage.used, usage.cached, usage.free, empty, slots, usage.saved,
        )  # fmt: skip
        self._count += 1

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """One float64 [steps] for each of `SERIES`."""
        return dict(zip(SERIES, self._rows[: self._count].T.copy(), strict=True))


@dataclass(frozen=True, slots=True)
class Result:
    """One run. Arrays are by request, in order of arrival; times in simulated seconds, NaN where there is none.

    Attributes:
        name, setup: what it ran on.
        arrival, admitted, first, last: when it came, was first computed, had its first and its last token.
        prompt, output, cached: tokens; of the prompt, found in the cache.
        preempted: how often it lost its pages.
        gaps: float32, seconds between consecutive tokens, of all requests.
        refused: requests that were not run, by reason.
        series: the pool after every step, see `SERIES`.
        seconds: length of the run. preemptions: in all. copied_bytes: moved to make room.
    """

    name: str
    setup: Mapping[str, Any]
    arrival: NDArray[np.float64]
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    admitted: NDArray[np.float64]
    first: NDArray[np.float64]
    last: NDArray[np.float64]
    cached: NDArray[np.int64]
    preempted: NDArray[np.int32]
    gaps: NDArray[np.float32]
    refused: Mapping[str, int]
    series: Mapping[str, NDArray[np.float64]]
    seconds: float
    preemptions: int
    copied_bytes: int

    @property
    def ended(self) -> NDArray[np.bool_]:
        """bool [n], the requests that ran to their end."""
        return ~np.isnan(self.last)

    @property
    def ttft(self) -> NDArray[np.float64]:
        """Seconds to the first token of those that ran."""
        return (self.first - self.arrival)[self.ended]

    @property
    def queueing(self) -> NDArray[np.float64]:
        """Seconds until the first chunk of those that ran."""
        return (self.admitted - self.arrival)[self.ended]

    @property
    def waste(self) -> float:
        """Share of the reserved slots that held no token, over time."""
        weights = np.diff(self.series["seconds"], prepend=0.0)
        slots = float((self.series["used_slots"] * weights).sum())
        return float((self.series["empty_slots"] * weights).sum()) / slots if slots else 0.0

    def running(self) -> tuple[float, int]:
        """Requests running at once: mean over the time of steps, and most."""
        count = self.series["running"]
        return (float(count.mean()), int(count.max())) if count.size else (0.0, 0)

    def figures(self) -> dict[str, float]:
        """The run in numbers; seconds, tokens per second, shares from 0 to 1."""
        ended, ttft, queueing = self.ended, self.ttft, self.queueing
        mean_running, most_running = self.running()
        prompts = int(self.prompt[ended].sum())
        return {
            "requests": float(self.arrival.size),
            "completed": float(ended.sum()),
            "refused": float(sum(self.refused.values())),
            "seconds": self.seconds,
            "requests_per_second": _per(ended.sum(), self.seconds),
            "output_tokens_per_second": _per(self.output[ended].sum(), self.seconds),
            "running_mean": mean_running,
            "running_max": float(most_running),
            "waste": self.waste,
            "queueing_mean": _mean(queueing),
            "queueing_p95": _percentile(queueing, 95),
            "ttft_mean": _mean(ttft),
            "ttft_p50": _percentile(ttft, 50),
            "ttft_p95": _percentile(ttft, 95),
            "ttft_p99": _percentile(ttft, 99),
            "ttft_std": float(ttft.std()) if ttft.size else 0.0,
            "itl_mean": _mean(self.gaps),
            "itl_p50": _percentile(self.gaps, 50),
            "itl_p95": _percentile(self.gaps, 95),
            "preemptions": float(self.preemptions),
            "hit_rate": _per(self.cached[ended].sum(), prompts),
            "copied_bytes": float(self.copied_bytes),
        }


def _per(amount: Any, whole: float) -> float:
    return float(amount) / whole if whole else 0.0


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean(dtype=np.float64)) if values.size else 0.0


def _percentile(values: NDArray[Any], percent: float) -> float:
    return float(np.percentile(values, percent)) if values.size else 0.0
