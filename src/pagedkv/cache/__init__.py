"""The allocator: who owns which page. Arrays in, arrays out; NumPy and the standard library only."""

from pagedkv.cache.audit import audit, check
from pagedkv.cache.contiguous import ContiguousManager
from pagedkv.cache.hashing import ChainHash
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.outcomes import Admitted, CacheManager, Extended, Forked, Never, Sequence, Usage, Wait

__all__ = [
    "Admitted",
    "CacheManager",
    "ChainHash",
    "ContiguousManager",
    "Extended",
    "Forked",
    "KVCacheManager",
    "Never",
    "Sequence",
    "Usage",
    "Wait",
    "audit",
    "check",
]
