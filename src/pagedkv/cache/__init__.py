"""The allocator: who owns which page. Arrays in, arrays out; NumPy and the standard library only."""

from pagedkv.cache.audit import audit, check
from pagedkv.cache.contiguous import ContiguousManager
from pagedkv.cache.hashing import ChainHash
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.outcomes import NO_COPIES, Admitted, CacheManager, Extended, Forked, Never, Sequence, Usage, Wait

__all__ = [
    "NO_COPIES",
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
