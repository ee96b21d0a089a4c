"""Misses: why the part of a prompt that was not found in the cache was not, and how soon evicted content was missed.

Remembers keys of what prompts and answers held, as many as several pools would hold. Exact up to that memory, and up
to collisions of 64-bit keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache import KVCacheManager
from pagedkv.cache.eviction import Pages
from pagedkv.monitor.histogram import Histogram

Reason = Literal["too_short", "never_seen", "evicted", "other_namespace"]
REASONS: tuple[Reason, ...] = ("too_short", "never_seen", "evicted", "other_namespace")
MEMORY = 4
"""Pools whose content is remembered."""

REGRET_SECONDS = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0)


class Misses:
    """Told of prompts at their first admission, of answers at their end, and of evicted pages.

    Attributes:
        tokens: prompt tokens not found, by reason.
        regret: seconds from an eviction until a prompt wanted the page again.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.tokens: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self.regret = Histogram(REGRET_SECONDS)
        self._seen: OrderedDict[int, None] = OrderedDict()  # content
        self._seen_in: OrderedDict[int, None] = OrderedDict()  # content and namespace
        self._evicted: OrderedDict[int, float] = OrderedDict()  # key of the index -> when

    def admitted(self, prompt: NDArray[np.int32], cached_tokens: int, namespace: Hashable, now: float) -> Reason:
        """Count a prompt; returns the reason of its first miss ("too_short" if nothing more could have been found)."""
        size = self.manager.page_size
        usable = (prompt.size - 1) // size
        found = cached_tokens // size
        content, keys = self._keys(prompt[: usable * size], namespace)
        first: Reason | None = None
        wanted = []
        for at in range(found, usable):
            reason = self._reason(content[at], namespace)
            first = first or reason
            self.tokens[reason] += size
            then = self._evicted.pop(keys[at], None) if keys else None
            if then is not None:
                wanted.append(now - then)
        self.regret.add(wanted)
        self.tokens["too_short"] += prompt.size - max(usable * size, cached_tokens)
        if usable > found:  # of the page that was found in part
            self.tokens[first or "never_seen"] -= cached_tokens - found * size
        self._remember(content, namespace)
        return first or "too_short"

    def ended(self, tokens: NDArray[np.int32], namespace: Hashable) -> None:
        """Remember what a prompt and its answer held."""
        full = tokens.size // self.manager.page_size
        self._remember(self._keys(tokens[: full * self.manager.page_size], namespace)[0], namespace)

    def evicted(self, pages: Pages, now: float) -> None:
        """These pages have been evicted, and are not indexed anew."""
        for key in self.manager.index.key[pages[~self.manager.index.indexed[pages]]].tolist():
            self._evicted[key] = now
        _bound(self._evicted, MEMORY * self.manager.num_pages)

    def _reason(self, content: int, namespace: Hashable) -> Reason:
        if content ^ hash(namespace) in self._seen_in:
            return "evicted"
        return "other_namespace" if content in self._seen else "never_seen"

    def _remember(self, content: list[int], namespace: Hashable) -> None:
        name = hash(namespace)
        for key in content:
            self._seen[key] = None
            self._seen_in[key ^ name] = None
        for memory in (self._seen, self._seen_in):
            _bound(memory, MEMORY * self.manager.num_pages)

    def _keys(self, tokens: NDArray[np.int32], namespace: Hashable) -> tuple[list[int], list[int]]:
        """Per full page, a key of its content whatever the namespace, and the index's own (none if it has no root)."""
        size, hasher = self.manager.page_size, self.manager.index.hasher
        pages = tokens.reshape(-1, size)
        sums = np.cumsum(hasher.page_sums(pages, np.arange(len(pages))), dtype=np.uint64)
        root = self.manager.namespaces.find(namespace)
        content: list[int] = hasher.finish(sums).tolist()
        keys: list[int] = hasher.finish(sums + hasher.root_sum(root)).tolist() if root else []
        return content, keys


def _bound(memory: OrderedDict[int, None] | OrderedDict[int, float], most: int) -> None:
    while len(memory) > most:
        memory.popitem(last=False)
