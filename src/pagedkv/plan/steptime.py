"""How long a step takes: from the roofline of a named device, or fitted to a measured profile.

A step's work is counted once (`Work`); models of time know nothing about requests or pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv.budget import DTYPE_BYTES
from pagedkv.errors import ConfigError
from pagedkv.plan.planner import KV_DTYPES, Plan


class Work(NamedTuple):
    """What one step computes.

    Attributes:
        starts, counts: int64 [sequences]; tokens before, and tokens computed, of each.
        copied_bytes: bytes of pages that are copied first.
    """

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    copied_bytes: int = 0


class StepTime(Protocol):
    """A model of time."""

    def seconds(self, work: Work) -> float:
        """Seconds that the step takes."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """The larger of reading and computing, at a share of what the data sheet promises (Williams et al. 2009).

    ::

        reading      weights that the step's tokens meet + keys and values that they see        / bandwidth
        computing    2 x active parameters x tokens + 4 x query elements x pairs of tokens      / operations per second

    plus `fixed` for a step and `per_sequence` for each of its sequences. Tensor parallelism divides both; what ranks
    say to each other is not counted.

    Attributes:
        dense_bytes, expert_bytes: weights of a rank that every token meets, and those of the routed experts.
        expert_share: share of the experts that one token meets.
        flops_per_token: operations of a token on a rank, without attention.
        token_bytes: keys and values of a token in layers with full attention. window_bytes: (window, bytes) of others.
        pair_flops: operations per pair of a query and a key it sees, over all layers.
        bandwidth, flops: of the device, as far as they are reached.
    """

    dense_bytes: float
    expert_bytes: float
    expert_share: float
    flops_per_token: float
    token_bytes: float
    window_bytes: tuple[tuple[int, float], ...]
    pair_flops: float
    bandwidth: float
    flops: float
    fixed: float = 2e-3
    per_sequence: float = 5e-6

    def seconds(self, work: Work) -> float:
        """Seconds that the step takes."""
        tokens = float(work.counts.sum())
        ends = work.starts + work.counts
        pairs = float((work.counts * (work.starts + (work.counts + 1) / 2)).sum())
        met = 1 - (1 - self.expert_share) ** tokens
        read = self.dense_bytes + self.expert_bytes * met + self.token_bytes * float(ends.sum())
        for window, size in self.window_bytes:
            read += size * float(np.minimum(ends, window + work.counts).sum())
        computed = self.flops_per_token * tokens + self.pair_flops * pairs
        busy = max((read + 2 * work.copied_bytes) / self.bandwidth, computed / self.flops)
        return self.fixed + self.per_sequence * work.counts.size + busy


BANDWIDTH_REACHED = 0.8
"""Share of a data sheet's bandwidth that decoding reaches: what well-tuned engines show on long batches."""
FLOPS_REACHED = 0.5
"""Share of a data sheet's operations that prefill reaches."""


def roofline(plan: Plan) -> Roofline:
    """The roofline of a plan's model on its device.

    Raises:
        ConfigError: only the device's bytes are known.
    """
    device, weights, spec = plan.device, plan.weights, plan.model.spec.on_rank(plan.settings.tp)
    if not device.bandwidth or not device.flops:
        raise ConfigError(
            f"how fast {device.name} is, is not known: name a GPU, or give what `pagedkv profile` measured (--profile)"
        )
    element = DTYPE_BYTES[KV_DTYPES[plan.settings.kv_dtype]]
    windows: dict[int | None, float] = {}
    for layer in spec.layers:
        windows[layer.window] = windows.get(layer.window, 0.0) + layer.elements_per_token * element
    share, experts = weights.expert_share, weights.expert_bytes
    return Roofline(
        dense_bytes=weights.active_bytes - share * experts,
        expert_bytes=experts,
        expert_share=share,
        flops_per_token=2 * weights.active / plan.settings.tp,
        token_bytes=windows.pop(None, 0.0),
        window_bytes=tuple((window, size) for window, size in windows.items() if window is not None),
        pair_flops=sum(2 * layer.query_heads * (layer.key_dim + layer.value_dim) for layer in spec.layers),
        bandwidth=device.bandwidth * BANDWIDTH_REACHED,
        flops=device.flops * FLOPS_REACHED,
    )


FEATURES = ("step", "token", "sequence", "context_token", "pair", "copied_byte")


def features(work: Work) -> NDArray[np.float64]:
    """float64 [6]: one step, its tokens, sequences, tokens in context, pairs of tokens, and bytes copied."""
    ends = work.starts + work.counts
    pairs = (work.counts * (work.starts + (work.counts + 1) / 2)).sum()
    return np.array([1.0, work.counts.sum(), work.counts.size, ends.sum(), pairs, work.copied_bytes], np.float64)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A sum over a step's features, with coefficients in seconds that were fitted to measured steps."""

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.coefficients) != len(FEATURES):
            raise ConfigError(f"{len(self.coefficients)} coefficients; a step has the features {', '.join(FEATURES)}")

    def seconds(self, work: Work) -> float:
        """Seconds that the step takes."""
        return float(features(work) @ np.array(self.coefficients))
