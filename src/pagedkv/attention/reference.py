"""The oracle: gather keys and values through the block table, then attend in the plainest way.

Page tensors are in the logical order [page, token, kv_head, dim]. Slow and simple on purpose; runs anywhere torch does.
Nothing here is shared with a real backend, except what a batch must look like.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.attention.batch import check_batch, check_pages, check_slots
from pagedkv.attention.interface import AttentionBatch, AttentionOptions, LayerPages
from pagedkv.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """A checked batch."""

    batch: AttentionBatch


class ReferenceBackend:
    """Implements `AttentionBackend` by gathering; arithmetic is in `dtype`, float32 or float64."""

    name = "reference"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def allocate(self, layer: LayerSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> LayerPages:
        """Zeroed [num_pages, page_size, kv_heads, dim] tensors."""
        shape = (num_pages, page_size, layer.kv_heads)
        key = torch.zeros(*shape, layer.key_dim, dtype=dtype)
        value = torch.zeros(*shape, layer.value_dim, dtype=dtype)
        return LayerPages(layer, key, value)

    def plan(self, batch: AttentionBatch) -> ReferencePlan:
        """Check the batch.

        Raises:
            InvalidRequestError: if lengths, rows or query offsets contradict each other.
        """
        check_batch(batch)
        return ReferencePlan(batch)

    def write(self, pages: LayerPages, key: torch.Tensor, value: torch.Tensor, plan: ReferencePlan) -> None:
        """Store key [T, kv_heads, key_dim] and value [T, kv_heads, value_dim]; slot -1 skips the token."""
        num_pages, page_size = pages.key.shape[:2]
        check_slots(plan.batch, num_pages, page_size)
        kept = np.flatnonzero(plan.batch.slots >= 0)
        slots = torch.from_numpy(plan.batch.slots[kept]).long()
        page, token = slots // page_size, slots % page_size
        pages.key[page, token] = key[kept].to(pages.key.dtype)
        pages.value[page, token] = value[kept].to(pages.value.dtype)

    def attend(
        self, pages: LayerPages, query: torch.Tensor, plan: ReferencePlan, options: AttentionOptions
    ) -> torch.Tensor:
        """Output [T, query_heads, value_dim] for query [T, query_heads, key_dim], in the query's dtype."""
        batch = plan.batch
        num_pages, page_size = pages.key.shape[:2]
        check_pages(batch, num_pages, page_size, options.window)
        output = query.new_empty(query.shape[0], query.shape[1], pages.spec.value_dim)
        for sequence, row in enumerate(batch.rows):
            begin, end = int(batch.query_start[sequence]), int(batch.query_start[sequence + 1])
            length = int(batch.kv_length[sequence])
            positions = torch.arange(length - (end - begin), length)
            first = 0 if options.window is None else max(0, int(positions[0]) - options.window + 1)
            first = first // page_size * page_size
            columns = batch.table[row, first // page_size : -(-length // page_size)]
            chosen = torch.from_numpy(columns.astype(np.int64))
            key = pages.key[chosen].flatten(0, 1)[: length - first].to(self._dtype)
            value = pages.value[chosen].flatten(0, 1)[: length - first].to(self._dtype)
            places = torch.arange(first, length)
            output[begin:end] = self._one(query[begin:end].to(self._dtype), key, value, positions, places, options)
        return output

    def _one(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """One sequence: query [t, query_heads, key_dim] at `positions`, key and value [s, kv_heads, dim] at `places`.

        Values that no query of the sequence sees are blanked: a weight of 0 does not make a NaN harmless.
        """
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,shd->hts", query, key) * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        visible = places[None, :] <= positions[:, None]
        if options.window is not None:
            visible &= places[None, :] > positions[:, None] - options.window
        scores = scores.masked_fill(~visible, float("-inf"))
        if options.sinks is not None:
            sinks = options.sinks.to(self._dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[0]]
        value = value.masked_fill(~visible.any(0)[:, None, None], 0.0)
        return torch.einsum("hts,shd->thd", weights, value)

    def copy_pages(self, pages: LayerPages, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        """Copy whole pages: target[i] becomes a copy of what source[i] was."""
        chosen, places = torch.from_numpy(source.astype(np.int64)), torch.from_numpy(target.astype(np.int64))
        pages.key[places] = pages.key[chosen]
        pages.value[places] = pages.value[chosen]
