"""Recording and snapshot: the calls that a manager has answered, to be replayed, and its whole state as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.eviction import DEFAULT_LEVEL
from pagedkv.cache.hashing import ChainHash
from pagedkv.cache.journal import Call

if TYPE_CHECKING:
    from pagedkv.cache.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class Recording:
    """What a manager was made with, and every call that it has answered since; refusals too, failures not.

    All of it can be pickled if the namespaces can.

    Attributes:
        settings: arguments of KVCacheManager but for the hasher.
        seed: of the hasher.
        calls: in order; more are added as long as the manager is used.
    """

    settings: Mapping[str, int | bool]
    seed: int
    calls: Sequence[Call]

    def replay(self, hasher: ChainHash | None = None) -> KVCacheManager:
        """A fresh manager that has answered the same calls, and so has the same state.

        Args:
            hasher: where keys come from, if not from a ChainHash of the same seed.
        """
        from pagedkv.cache.manager import KVCacheManager

        manager = KVCacheManager(**self.settings, hasher=hasher or ChainHash(self.seed))  # type: ignore[arg-type]
        for call in self.calls:
            getattr(manager, call.verb)(*call.args, **call.kwargs)
        return manager


def snapshot(manager: KVCacheManager) -> dict[str, NDArray[np.generic]]:
    """`KVCacheManager.snapshot`."""
    pool, table, index, reservations = manager.pool, manager.table, manager.index, manager.reservations
    pins = manager.pins.by_number()
    names, retentions = manager.namespaces.users(), manager.retentions
    state = np.where(pool.refcount > 0, 2, np.where(pool.queue.position >= 0, 1, 0)).astype(np.int8)
    arrays: dict[str, NDArray[np.generic]] = {
        "page_state": state,
        "page_owners": pool.refcount,
        "page_account": np.where(state > 0, pool.accounts.of, 0),
        "page_indexed": index.indexed,
        "page_parent": np.where(index.indexed, index.parent, 0),
        "page_key": np.where(index.indexed, index.key, np.uint64(0)),
        "page_tokens": np.where((state > 0)[:, None], index.tokens, 0),
        "page_priority": retentions.priority if retentions.active else np.full(state.size, DEFAULT_LEVEL, np.int8),
        "page_priority_end": retentions.ends if retentions.active else np.full(state.size, -np.inf),
        "clock": np.array(retentions.now),
        "free_stack": pool.stack[: pool.free],
        "eviction_order": pool.queue.queued(),
        "eviction_level": pool.queue.level[pool.queue.queued()],
        "row_table": table.table,
        "row_pages": table.pages,
        "row_length": table.length,
        "row_computed": table.computed,
        "row_live": table.live,
        "row_generation": table.generation,
        "row_owner": np.array([table.owners.get(row, "") for row in range(table.max_rows)], np.str_),
        "row_root": np.where(table.live, manager.root, 0),
        "row_indexed": np.where(table.live, manager.indexed, 0),
        "row_shares_tail": manager.shares_tail,
        "row_promised": reservations.promise,
        "row_entitled": reservations.entitled,
        "pin_number": np.array(list(pins), np.int64),
        "pin_indptr": np.cumsum([0, *(len(pages) for pages in pins.values())]),
        "pin_pages": np.array([page for pages in pins.values() for page in pages], np.int32),
        "namespace_root": np.array(list(names), np.int32),
        "namespace_name": np.array([repr(manager.namespaces.name(root)) for root in names], np.str_),
        "namespace_limits": np.array(
            [(manager.tenants.floor(-root), _or_minus_one(manager.tenants.ceiling(-root))) for root in names], np.int64
        ).reshape(-1, 2),
    }
    return {name: array.copy() for name, array in arrays.items()}


def _or_minus_one(ceiling: int | None) -> int:
    return -1 if ceiling is None else ceiling
