"""The allocator: who owns which page. Arrays in, arrays out; NumPy and the standard library only."""

from pagedkv.cache.audit import audit, check
from pagedkv.cache.audit_groups import audit_groups
from pagedkv.cache.content import ContentIds, content_of
from pagedkv.cache.contiguous import ContiguousManager, GrowingContiguousManager
from pagedkv.cache.events import EventBatch, EventKind, Events
from pagedkv.cache.fragmentation import Fragmentation
from pagedkv.cache.groups import GroupedManager
from pagedkv.cache.hashing import ChainHash
from pagedkv.cache.interop import BlockTable, PagesCSR, block_table, check_csr, check_page_size, csr, slot_mapping
from pagedkv.cache.layers import GroupUsage, LayerGroup, Placed
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.outcomes import NO_COPIES, Admitted, CacheManager, Extended, Forked, Never, Sequence, Usage, Wait
from pagedkv.cache.pins import EVERY_NAMESPACE, Pinned, ResetResult
from pagedkv.cache.recording import Recording
from pagedkv.cache.resizing import Resized
from pagedkv.cache.retention import Retention
from pagedkv.cache.table import PageTable
from pagedkv.cache.tenants import NamespaceUsage

__all__ = [
    "EVERY_NAMESPACE",
    "NO_COPIES",
    "Admitted",
    "BlockTable",
    "CacheManager",
    "ChainHash",
    "ContentIds",
    "ContiguousManager",
    "EventBatch",
    "EventKind",
    "Events",
    "Extended",
    "Forked",
    "Fragmentation",
    "GroupUsage",
    "GroupedManager",
    "GrowingContiguousManager",
    "KVCacheManager",
    "LayerGroup",
    "NamespaceUsage",
    "Never",
    "PageTable",
    "PagesCSR",
    "Pinned",
    "Placed",
    "Recording",
    "ResetResult",
    "Resized",
    "Retention",
    "Sequence",
    "Usage",
    "Wait",
    "audit",
    "audit_groups",
    "block_table",
    "check",
    "check_csr",
    "check_page_size",
    "content_of",
    "csr",
    "slot_mapping",
]
