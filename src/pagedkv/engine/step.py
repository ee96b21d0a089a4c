"""Step: what the scheduler has chosen for one forward pass, as flat arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache import NO_COPIES
from pagedkv.engine.request import Request


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes: of requests[i], tokens starts[i] to starts[i] + counts[i] - 1.

    Attributes:
        requests: decodes first, then prompt chunks.
        tokens: token ids int32 [sum(counts)], request after request.
        rows, starts, counts: int64 [requests].
        samples: bool [requests]; whether the request's last token here is its last known one, so that the step
            yields its next token.
        preempted: requests that lost their pages to make room.
        copies: int32 [pairs, 2]; (source, target) pages to copy, all reads before all writes, before the step writes.
    """

    requests: list[Request] = field(default_factory=list)
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    starts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    samples: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    preempted: list[Request] = field(default_factory=list)
    copies: NDArray[np.int32] = field(default_factory=lambda: NO_COPIES)
