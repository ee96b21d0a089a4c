"""Pools: the page tensors and the allocator that an engine's settings ask for."""

from __future__ import annotations

from typing import Literal

import torch

from pagedkv.attention.cpu.backend import CpuBackend
from pagedkv.budget import kv_tokens
from pagedkv.cache import CacheManager, ContiguousManager, KVCacheManager
from pagedkv.config import EngineConfig
from pagedkv.errors import OutOfMemoryBudgetError
from pagedkv.models.loaded import LoadedModel
from pagedkv.store.pages import PageStore

Allocator = Literal["paged", "contiguous"]


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


def make_manager(num_pages: int, config: EngineConfig, max_seq_len: int, allocator: Allocator) -> CacheManager:
    """The allocator, paged or contiguous."""
    page_size, rows = config.kv_cache_config.page_size, config.max_batch_size
    if allocator == "contiguous":
        return ContiguousManager(num_pages, page_size, max_rows=rows, max_seq_len=max_seq_len)
    return KVCacheManager(
        num_pages,
        page_size,
        max_rows=rows,
        max_seq_len=max_seq_len,
        prefix_caching=config.kv_cache_config.enable_block_reuse,
        partial_reuse=config.kv_cache_config.enable_partial_reuse,
    )
