"""Drives a LoadedModel over pages by hand: a shuffled block table, chunks of several sequences per step."""

from __future__ import annotations

import numpy as np
import torch

from pagedkv.attention.interface import AttentionBatch
from pagedkv.attention.reference import ReferenceBackend
from pagedkv.models.loaded import LoadedModel
from pagedkv.store.pages import PageStore


def pages_for(model: LoadedModel, count: int, page_size: int) -> PageStore:
    return PageStore(model.spec, ReferenceBackend(), count, page_size, model.dtype)


def paged_logits(
    model: LoadedModel, sequences: list[list[int]], chunks: list[list[int]], page_size: int = 4
) -> list[torch.Tensor]:
    """Logits [tokens, vocabulary] of each sequence, computed `chunks[sequence]` tokens per step; 0 sits a step out."""
    columns = max(-(-len(tokens) // page_size) for tokens in sequences)
    table = np.random.default_rng(7).permutation(len(sequences) * columns).astype(np.int32) + 1
    table = table.reshape(len(sequences), columns)
    store = pages_for(model, table.size, page_size)
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in range(max(map(len, chunks))):
        counts = [plan[step] if step < len(plan) else 0 for plan in chunks]
        rows = [row for row, count in enumerate(counts) if count]
        places = [np.arange(done[row], done[row] + counts[row]) for row in rows]
        where = zip(rows, places, strict=True)
        slots = [table[row, at // page_size].astype(np.int64) * page_size + at % page_size for row, at in where]
        batch = AttentionBatch(
            query_start=np.cumsum([0] + [counts[row] for row in rows], dtype=np.int32),
            kv_length=np.array([done[row] + counts[row] for row in rows], dtype=np.int32),
            rows=np.array(rows, dtype=np.int32),
            table=table,
            slots=np.concatenate(slots),
        )
        tokens = [token for row, at in zip(rows, places, strict=True) for token in sequences[row][at[0] : at[-1] + 1]]
        flat = model.forward(
            torch.tensor(tokens),
            torch.from_numpy(np.concatenate(places)),
            torch.arange(len(tokens)),
            store,
            store.backend.plan(batch),
        )
        for row, part in zip(rows, flat.split([counts[row] for row in rows]), strict=True):
            logits[row].append(part)
            done[row] += counts[row]
    return [torch.cat(parts) for parts in logits]
