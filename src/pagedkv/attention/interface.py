"""What an attention backend is: it owns the physical order of page tensors, plans a step once, and runs per layer.

A backend never allocates pages and never decides who owns one; it is handed the block table, which is the very array
the allocator keeps, and reads the rows it is told to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv.spec import LayerSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The ragged batch of one step: B sequences with T query tokens in all, one after the other.

    ::

        sequence            0         1     2
        query tokens     |q q q q q| |q| |q q q|       T = 9
        query_start      0           5   6       9
        kv_length        5           42  19           keys visible to the last query of each sequence

    The last query of sequence b sits at position kv_length[b] - 1, the one before it at kv_length[b] - 2, and so on:
    prefill, chunked prefill, decode and verification are the same thing.

    Attributes:
        query_start: int32 [B + 1], offsets of the sequences in the flat batch.
        kv_length: int32 [B], tokens of each sequence in the cache once this step's keys are written.
        rows: int32 [B], row of each sequence in `table`.
        table: int32 [R, C], the block table: table[row, column] is the page with tokens
            column * page_size ... (column + 1) * page_size - 1 of that row. Not copied; page 0 is the null page.
        slots: int64 [T], where to write each token's key and value: page * page_size + offset; -1 skips.
    """

    query_start: NDArray[np.int32]
    kv_length: NDArray[np.int32]
    rows: NDArray[np.int32]
    table: NDArray[np.int32]
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends.

    Attributes:
        scale: factor on the query-key products.
        window: tokens a query sees, itself included (a key is visible while kv > q - window); None for all.
        softcap: c in c * tanh(score / c), applied after the scale and before the mask; None for none.
        sinks: [query_heads] logits that join the softmax's denominator only; None for none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The page tensors of one layer, in the backend's own physical order. Page 0 is the null page."""

    spec: LayerSpec
    key: torch.Tensor
    value: torch.Tensor


class AttentionBackend(Protocol):
    """Prefill, chunked prefill, decode and verification over paged keys and values."""

    name: str

    def allocate(self, layer: LayerSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> LayerPages:
        """Zeroed page tensors for one layer; `num_pages` includes the null page."""
        ...

    def plan(self, batch: AttentionBatch) -> Any:
        """Work out, once per step, how the batch is split over threads; `write` and `attend` take the result."""
        ...

    def write(self, pages: LayerPages, key: torch.Tensor, value: torch.Tensor, plan: Any) -> None:
        """Store key [T, kv_heads, key_dim] and value [T, kv_heads, value_dim] at the batch's slots."""
        ...

    def attend(self, pages: LayerPages, query: torch.Tensor, plan: Any, options: AttentionOptions) -> torch.Tensor:
        """Output [T, query_heads, value_dim] for query [T, query_heads, key_dim], in the query's dtype."""
        ...

    def copy_pages(self, pages: LayerPages, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        """Copy whole pages: target[i] becomes a copy of source[i]."""
        ...
