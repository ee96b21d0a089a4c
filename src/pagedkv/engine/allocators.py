"""Allocators by name: pages, or the traditional contiguous rooms to compare with. Knows no tensors."""

from __future__ import annotations

from typing import Literal, get_args

from pagedkv.cache import CacheManager, ContiguousManager, GrowingContiguousManager, KVCacheManager
from pagedkv.config import EngineConfig

Allocator = Literal["paged", "contiguous", "growing"]
"""Pages; contiguous, with room for max_seq_len tokens; contiguous, with room for what there is, moved as it grows."""
ALLOCATORS: tuple[Allocator, ...] = get_args(Allocator)


def make_manager(
    allocator: Allocator,
    num_pages: int,
    config: EngineConfig,
    max_seq_len: int,
    *,
    page_size: int | None = None,
    prefix_caching: bool | None = None,
) -> CacheManager:
    """The allocator, empty. Contiguous ones cache nothing.

    Args:
        page_size, prefix_caching: instead of the settings' (a simulation tries sizes that no kernel takes).
    """
    cache, rows = config.kv_cache_config, config.max_batch_size
    size = cache.page_size if page_size is None else page_size
    if allocator == "contiguous":
        return ContiguousManager(num_pages, size, max_rows=rows, max_seq_len=max_seq_len)
    if allocator == "growing":
        return GrowingContiguousManager(num_pages, size, max_rows=rows, max_seq_len=max_seq_len)
    return KVCacheManager(
        num_pages,
        size,
        max_rows=rows,
        max_seq_len=max_seq_len,
        prefix_caching=cache.enable_block_reuse if prefix_caching is None else prefix_caching,
        partial_reuse=cache.enable_partial_reuse,
    )
