"""The allocator: who owns which page. Arrays in, arrays out; NumPy and the standard library only."""

from pagedkv.cache.audit import audit, check
from pagedkv.cache.contiguous import ContiguousManager
from pagedkv.cache.hashing import ChainHash
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.outcomes import NO_COPIES, Admitted, CacheManager, Extended, Forked, Never, Sequence, Usage, Wait
from pagedkv.cache.retention import EVERY_NAMESPACE, Pinned, ResetResult

__all__ = [
    "EVERY_NAMESPACE",
    "NO_COPIES",
    "Admitted",
    "CacheManager",
    "ChainHash",
    "ContiguousManager",
    "Extended",
    "Forked",
    "KVCacheManager",
    "Never",
    "Pinned",
    "ResetResult",
    "Sequence",
    "Usage",
    "Wait",
    "audit",
    "check",
]
