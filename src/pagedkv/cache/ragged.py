"""Ragged index arithmetic: groups of different sizes laid end to end, without a Python loop."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ragged(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group number and offset within the group of every element.

    ::

        counts          2     0   3
        group        [0 0         2 2 2]
        offset       [0 1         0 1 2]

    Args:
        counts: int64 [groups], none negative.

    Returns:
        Two int64 arrays [sum(counts)].
    """
    if (counts == 1).all():  # a decode step: every group has one element
        return np.arange(counts.size), np.zeros(counts.size, np.int64)
    group = np.repeat(np.arange(counts.size), counts)
    starts = np.cumsum(counts) - counts
    return group, np.arange(group.size) - starts[group]


def prefix_all(ok: NDArray[np.bool_], counts: NDArray[np.int64], group: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Per element: do it and all elements before it in its group hold? (`group` as `ragged(counts)` gives it.)"""
    failures = np.cumsum(~ok)
    starts = np.cumsum(counts) - counts
    before = np.concatenate(([0], failures))[starts]
    return failures == before[group]
