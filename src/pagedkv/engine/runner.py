"""ModelRunner: turns a scheduled step into one flat forward pass over paged keys and values."""

from __future__ import annotations

import numpy as np
import torch

from pagedkv.attention.interface import AttentionBatch
from pagedkv.cache.ragged import ragged
from pagedkv.cache.table import PageTable
from pagedkv.engine.step import Step
from pagedkv.models.loaded import LoadedModel
from pagedkv.store.pages import PageStore


class ModelRunner:
    """A model and the pages it reads and writes."""

    def __init__(self, model: LoadedModel, store: PageStore) -> None:
        self.model = model
        self.store = store

    def logits(self, step: Step, table: PageTable) -> torch.Tensor:
        """Compute the step's tokens; returns logits of the requests that sample, float32 [samples, vocabulary]."""
        if step.copies.size:
            self.store.copy_pages(step.copies[:, 0], step.copies[:, 1])
        plan = self.store.backend.plan(attention_batch(step, table))
        group, offset = ragged(step.counts)
        last = np.cumsum(step.counts) - 1
        return self.model.forward(
            torch.from_numpy(step.tokens.astype(np.int64)),
            torch.from_numpy(step.starts[group] + offset),
            torch.from_numpy(last[step.samples]),
            self.store,
            plan,
        )


def attention_batch(step: Step, table: PageTable) -> AttentionBatch:
    """The step as kernels want it. The block table is passed on as it stands, not copied."""
    return AttentionBatch(
        query_start=np.concatenate(([0], np.cumsum(step.counts))).astype(np.int32),
        kv_length=(step.starts + step.counts).astype(np.int32),
        rows=step.rows.astype(np.int32),
        table=table.table,
        slots=table.slots(step.rows, step.starts, step.counts),
    )
