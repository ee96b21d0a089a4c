"""Verbs: what the HTTP process can have the engine's process do or say between two steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from pagedkv.cache import EVERY_NAMESPACE, KVCacheManager, audit
from pagedkv.errors import InvalidRequestError
from pagedkv.monitor.frames import Frame, Frames, PageState, page_states, shown_name
from pagedkv.monitor.iteration import iteration_stats
from pagedkv.monitor.metrics import metrics_text
from pagedkv.monitor.monitor import Monitor
from pagedkv.serve.watchers import Watchers


class Verbs:
    """Each public method is a verb: its arguments and answer are plain values.

    Args:
        monitor: of the engine that they are about.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._engine = monitor.engine
        self._frames: Frames | None = None
        self.watchers: Watchers | None = None

    def carry_out(self, verb: str, arguments: dict[str, Any]) -> Any:
        """Carry out a verb by its name."""
        method = getattr(self, verb, None) if verb in VERBS else None
        if method is None:
            raise InvalidRequestError(f"there is no verb {verb!r}")
        return method(**arguments)

    def stats(self) -> dict[str, Any]:
        """Counters, and where the pages are."""
        return asdict(self._engine.stats())

    def audit(self) -> list[str]:
        """What the auditor finds."""
        return audit(self._engine.paged)

    def reset(self, **scope: Any) -> dict[str, int]:
        """Forget cached content, of one namespace if there is one."""
        namespace = scope.get("namespace", EVERY_NAMESPACE)
        result = self._engine.paged.reset(namespace=tuple(namespace) if isinstance(namespace, list) else namespace)
        self._monitor.refresh()
        return {"dropped": result.dropped, "held": result.held}

    def resize(self, num_pages: int) -> dict[str, int]:
        """Give the pool another number of pages."""
        size = self._engine.resize(num_pages)
        self._monitor.refresh()
        return {"num_pages": size}

    def snapshot(self) -> dict[str, Any]:
        """Where every page is, without what the pages hold."""
        return {name: array.tolist() for name, array in self._engine.paged.snapshot().items() if name != "page_tokens"}

    def metrics(self) -> str:
        """Metrics in Prometheus's text format."""
        return metrics_text(self._monitor)

    def iteration(self) -> dict[str, Any]:
        """TensorRT-LLM's statistics of the last iteration."""
        return iteration_stats(self._monitor)

    def frame(self, full: bool = False) -> Frame:
        """What has changed since the last frame."""
        if self._frames is None:
            self._frames = Frames(self._monitor, every_token=True)
            self._monitor.listeners.append(self._frames)
        return self._frames.take(self._monitor.refresh(), full=full)

    def figures(self) -> dict[str, Any]:
        """The figures of this moment, and counters whose differences are rates."""
        self._monitor.refresh()
        return self._monitor.counters()

    def kv_snapshot(self) -> dict[str, Any]:
        """All blocks of the index for routers; see `Watchers.kv_snapshot`."""
        if self.watchers is None:
            raise InvalidRequestError("KV events are not published here")
        return self.watchers.kv_snapshot()

    def page(self, page: int) -> dict[str, Any]:
        """Everything about one page, the ids of the tokens that it holds included."""
        now, manager = self._monitor.refresh(), self._engine.paged
        if not 1 <= page <= manager.num_pages:
            raise InvalidRequestError(f"there is no page {page}; pages are 1 to {manager.num_pages}")
        table, indexed = manager.table, bool(manager.index.indexed[page])
        rows = [row for row, ids in enumerate(table.table) if table.live[row] and page in ids[: table.pages[row]]]
        ids = manager.index.tokens[page]
        filled = manager.page_size if indexed else max((_filled(manager, row, page) for row in rows), default=0)
        state = PageState(int(page_states(manager, np.array([page], np.int32))[0]))
        root = -int(manager.pool.accounts.of[page])
        named = state is not PageState.FREE and root in manager.namespaces.users()
        return {
            "page": page,
            "state": state.name.lower(),
            "sharers": [table.owners[row] for row in rows],
            "parent": max(int(manager.index.parent[page]), 0) if indexed else 0,
            "namespace": shown_name(manager.namespaces.name(root)) if named else "",
            "age": now - float(self._monitor.feed.since[page]),
            "tokens": [int(token) for token in ids[:filled] if token >= 0] if state is not PageState.FREE else [],
        }


VERBS = frozenset(name for name in vars(Verbs) if not name.startswith("_") and name != "carry_out")


def _filled(manager: KVCacheManager, row: int, page: int) -> int:
    """Tokens of a page that one of its rows has places for."""
    column = int(np.flatnonzero(manager.table.table[row] == page)[0])
    return min(int(manager.table.length[row]) - column * manager.page_size, manager.page_size)
