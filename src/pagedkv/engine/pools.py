"""Pools: the page tensors that an engine's settings ask for."""

from __future__ import annotations

import torch

from pagedkv.attention.cpu.backend import CpuBackend
from pagedkv.budget import kv_tokens
from pagedkv.config import EngineConfig
from pagedkv.errors import OutOfMemoryBudgetError
from pagedkv.models.loaded import LoadedModel
from pagedkv.store.pages import PageStore


def make_store(model: LoadedModel, config: EngineConfig, max_seq_len: int) -> PageStore:
    """The page tensors that the configured budget pays for; one request of max_seq_len tokens must fit.

    Raises:
        OutOfMemoryBudgetError: it does not, or the machine has not so much memory.
    """
    cache = config.kv_cache_config
    dtype = torch.bfloat16 if cache.dtype == "auto" else getattr(torch, cache.dtype)
    name = str(dtype).removeprefix("torch.")
    pages = cache.num_pages(model.spec, name, min_tokens=kv_tokens(max_seq_len - 1, 1))
    try:
        return PageStore(model.spec, CpuBackend(), pages, cache.page_size, dtype)
    except MemoryError as error:
        raise OutOfMemoryBudgetError(f"the pool cannot be made: {error}") from None
