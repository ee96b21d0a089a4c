"""KV events for routers that send a request where its prefix is cached: what the index gains and loses, step by step.

The format is vLLM's (its ZmqEventPublisher), maps with a "type": BlockStored, BlockRemoved, AllBlocksCleared. A block
is a full page; its hash is the index's 64-bit key, which another process would choose otherwise. Token ids are
published, and salts as extra keys: whoever reads the events reads prompts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache import KVCacheManager
from pagedkv.monitor.monitor import Listener, Monitor
from pagedkv.monitor.page_feed import PageNews

Event = dict[str, Any]

MEDIUM = "GPU"
"""What routers call the tier that attention reads, whatever it is made of."""


class KVEvents(Listener):
    """Follows the index. A listener of the monitor.

    Args:
        monitor: who tells.
        publish: gets each step's number and events; steps without events have none.

    Attributes:
        sequence: number of the last batch; -1 before the first.
    """

    def __init__(self, monitor: Monitor, publish: Callable[[int, float, list[Event]], None]) -> None:
        self.manager: KVCacheManager = monitor.engine.paged
        self.sequence = -1
        self._publish = publish
        self._pending: list[Event] = []
        self._hash: dict[int, int] = {}  # page -> hash of what has been published for it
        self._follow(np.arange(1, self.manager.num_pages + 1, dtype=np.int32), resized=False)

    def pages(self, news: PageNews, now: float) -> None:
        """See `Listener`."""
        self._follow(news.pages, news.resized)

    def step_over(self, now: float) -> None:
        """See `Listener`."""
        if self._pending:
            self.sequence += 1
            self._publish(self.sequence, time.time(), self._pending)
            self._pending = []

    def snapshot(self) -> dict[str, Any]:
        """All blocks that are there, as of batch `sequence`: a mirror begins with it and goes on with the next one."""
        self.step_over(0.0)
        pages = np.array(sorted(self._hash), np.int32)
        return {"sequence": self.sequence, "events": list(_stored(self.manager, pages))}

    def _follow(self, pages: NDArray[np.int32], resized: bool) -> None:
        """Note what has become of these pages, or of all, if they have other numbers now."""
        before = dict(self._hash) if resized else {p: self._hash[p] for p in pages.tolist() if p in self._hash}
        full = pages[self.manager.index.indexed[pages] & (self.manager.index.tokens[pages, -1] >= 0)]
        after = dict(zip(full.tolist(), self.manager.index.key[full].tolist(), strict=True))
        everything = len(before) == len(self._hash)
        for page in before:
            del self._hash[page]
        self._hash |= after
        there, gone = set(after.values()), set(before.values())
        removed = [key for key in before.values() if key not in there]
        if removed and everything and not gone & there:
            self._pending.append({"type": "AllBlocksCleared"})
        elif removed:
            self._pending.append({"type": "BlockRemoved", "block_hashes": removed, "medium": MEDIUM, "group_idx": 0})
        new = np.array([page for page, key in after.items() if key not in gone], np.int32)
        self._pending += _stored(self.manager, new)


def _stored(manager: KVCacheManager, pages: NDArray[np.int32]) -> Iterator[Event]:
    """BlockStored events for these pages, a parent always before what continues it, and chains in one event each."""
    index = manager.index
    parents = dict(zip(pages.tolist(), index.parent[pages].tolist(), strict=True))
    children: dict[int, list[int]] = {}
    for page, parent in parents.items():
        children.setdefault(parent, []).append(page)
    starts = deque(page for page, parent in parents.items() if parent not in parents)
    while starts:
        chain = [starts.popleft()]
        while following := children.get(chain[-1]):
            chain.append(following[0])
            starts.extend(following[1:])
        yield _event(manager, np.array(chain, np.int32), parents[chain[0]])


def _event(manager: KVCacheManager, chain: NDArray[np.int32], parent: int) -> Event:
    index = manager.index
    extra: list[list[str] | None] = [None] * chain.size
    if parent < 0:
        name = manager.namespaces.name(parent)
        if name is not None:
            extra[0] = [str(part) for part in (name if isinstance(name, tuple) else (name,)) if part is not None]
    return {
        "type": "BlockStored",
        "block_hashes": index.key[chain].tolist(),
        "parent_block_hash": int(index.key[parent]) if parent > 0 else None,
        "token_ids": index.tokens[chain].ravel().tolist(),
        "block_size": manager.page_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
        "extra_keys": extra if any(extra) else None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
    }


class KVMirror:
    """What a router knows: every block with its parent and tokens, from a snapshot and the batches after it.

    Attributes:
        blocks: hash -> (parent's hash or None, token ids).
        sequence: of the last batch that was applied.
    """

    def __init__(self, snapshot: dict[str, Any] | None = None) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.sequence = -1
        if snapshot is not None:
            for event in snapshot["events"]:
                self._apply(event)
            self.sequence = snapshot["sequence"]

    def apply(self, sequence: int, events: list[Event]) -> None:
        """Take a batch; one that the snapshot covers is passed over.

        Raises:
            ValueError: batches are missing before this one.
        """
        if sequence <= self.sequence:
            return
        if sequence != self.sequence + 1:
            missing = sequence - self.sequence - 1
            raise ValueError(f"batch {sequence} follows batch {self.sequence}: {missing} are missing")
        self.sequence = sequence
        for event in events:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            for key in event["block_hashes"]:
                self.blocks.pop(key, None)
        else:
            parent, size, ids = event["parent_block_hash"], event["block_size"], event["token_ids"]
            for number, key in enumerate(event["block_hashes"]):
                self.blocks[key] = parent, tuple(ids[number * size : (number + 1) * size])
                parent = key
