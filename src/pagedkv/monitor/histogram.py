"""Histogram: counts per bucket and a sum, filled many values at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Histogram:
    """What Prometheus calls a histogram.

    Args:
        bounds: upper ends of the buckets, ascending; one without an end follows them.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0
        self._bounds = np.array(bounds)

    def add(self, values: Sequence[float]) -> None:
        """Count these values."""
        if values:
            at = np.searchsorted(self._bounds, values)
            self.counts += np.bincount(at, minlength=self.counts.size)
            self.sum += float(np.sum(values))

    @property
    def count(self) -> int:
        """How many values so far."""
        return int(self.counts.sum())

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper end as text, values up to it), ending with "+Inf"."""
        ends = [*map(str, self.bounds), "+Inf"]
        return list(zip(ends, np.cumsum(self.counts).astype(float).tolist(), strict=True))
