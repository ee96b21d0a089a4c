"""Frames: the state of every page, row and request as a first full picture and then only what has changed.

A frame is a dictionary of plain values and little-endian bytes, which msgpack writes as it is; a live page map, a
record and its replay all speak it.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache import KVCacheManager
from pagedkv.engine.request import Request, Status
from pagedkv.monitor.figures import tenant_of
from pagedkv.monitor.monitor import Listener, Monitor
from pagedkv.monitor.page_feed import PageNews

Frame = dict[str, Any]
"""
t: seconds since the monitor was made. step: number of the engine's last step. full: begin anew with this frame.
num_pages, page_size. pages: int32 [n], whose state follows: state uint8 [n] (PageState), account int32 [n], parent
int32 [n]; and with a full frame since float32 [n], seconds like t. accounts: account -> its namespace in words.
tables: [row, first changed column, pages, int32 page ids from that column on]. requests: those that have changed, in
the order of the queue. gone: keys of those that have ended.
"""

MOST_WAITING = 200
"""Waiting requests shown, from the head of the queue."""


class PageState(IntEnum):
    """What a page is; the highest that holds."""

    FREE = 0
    CACHED = 1
    USED = 2
    SHARED = 3
    PINNED = 4


STATE_NAMES = [state.name.lower() for state in PageState]


def page_states(manager: KVCacheManager, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
    """State of each of these pages, uint8 [n]."""
    owners = manager.pool.refcount[pages]
    states = np.where(owners > 1, PageState.SHARED, np.where(owners == 1, PageState.USED, PageState.FREE))
    states[(owners == 0) & (manager.pool.queue.position[pages] >= 0)] = PageState.CACHED
    pinned = manager.pins.by_number()
    if pinned:
        states[np.isin(pages, [page for each in pinned.values() for page in each])] = PageState.PINNED
    return states.astype(np.uint8)


class Frames(Listener):
    """What one spectator has not seen yet. A listener of the monitor.

    Args:
        monitor: who tells.
        every_token: send a running request again for every token, not only when its pages or state change.
    """

    def __init__(self, monitor: Monitor, *, every_token: bool) -> None:
        self.monitor = monitor
        self._every_token = every_token
        self._changed = np.zeros(0, np.bool_)
        self._restart()

    def pages(self, news: PageNews, now: float) -> None:
        """See `Listener`."""
        if news.resized or self._changed.size != self._manager.num_pages + 1:
            self._full = True
        elif not self._full:
            self._changed[news.pages] = True

    def take(self, now: float, *, full: bool = False) -> Frame:
        """What has changed since the last frame; everything, if that is asked for or necessary.

        Args:
            now: when the monitor was refreshed last.
        """
        if full or self._full:
            self._restart()
        manager = self._manager
        pages = np.flatnonzero(self._changed).astype(np.int32)
        states = page_states(manager, pages)
        accounts = np.where(states != PageState.FREE, manager.pool.accounts.of[pages], 0)
        requests, gone = self._requests()
        frame: Frame = {
            "t": now - self.monitor.started,
            "step": self.monitor.engine.scheduler.steps,
            "full": self._full,
            "num_pages": manager.num_pages,
            "page_size": manager.page_size,
            "pages": pages.tobytes(),
            "state": states.tobytes(),
            "account": accounts.tobytes(),
            "parent": np.where(manager.index.indexed[pages], manager.index.parent[pages], 0).tobytes(),
            "accounts": self._new_names(accounts),
            "tables": self._tables(),
            "requests": requests,
            "gone": gone,
        }
        if self._full:
            frame["since"] = (self.monitor.feed.since[pages] - self.monitor.started).astype(np.float32).tobytes()
        self._changed[:] = False
        self._full = False
        return frame

    @property
    def _manager(self) -> KVCacheManager:
        return self.monitor.engine.paged

    def _restart(self) -> None:
        """Nothing has been seen."""
        table = self._manager.table
        self._full = True
        self._changed = np.ones(self._manager.num_pages + 1, np.bool_)
        self._changed[0] = False
        self._table = np.zeros_like(table.table)
        self._pages = np.zeros_like(table.pages)
        self._shown: dict[int, tuple[Any, ...]] = {}
        self._names: dict[int, str] = {}

    def _new_names(self, accounts: NDArray[np.int32]) -> dict[int, str]:
        """Names of those of these accounts whose name was not sent yet; numbers are used again for other names."""
        numbers = np.unique(accounts[accounts > 0]).tolist()
        names = {number: shown_name(self._manager.namespaces.name(-number)) for number in numbers}
        new = {number: name for number, name in names.items() if self._names.get(number) != name}
        self._names |= new
        return new

    def _tables(self) -> list[tuple[int, int, int, bytes]]:
        """Changed ends of block tables."""
        table = self._manager.table
        if self._table.shape != table.table.shape:
            self._table, self._pages = np.zeros_like(table.table), np.zeros_like(table.pages)
        width = int(max(table.pages.max(initial=0), self._pages.max(initial=0)))
        differs = table.table[:, :width] != self._table[:, :width]
        rows = np.flatnonzero((table.pages != self._pages) | differs.any(axis=1))
        changed = []
        for row in rows.tolist():
            first = int(differs[row].argmax()) if differs[row].any() else int(table.pages[row])
            count = int(table.pages[row])
            changed.append((row, first, count, table.table[row, first:count].tobytes()))
        self._table[rows] = table.table[rows]
        self._pages[rows] = table.pages[rows]
        return changed

    def _requests(self) -> tuple[list[Frame], list[int]]:
        """Requests that look otherwise than when they were sent last, and the keys of those that are not there."""
        scheduler = self.monitor.engine.scheduler
        there = [*scheduler.running]
        there += [request for request, _ in zip(scheduler.waiting, range(MOST_WAITING), strict=False)]
        changed, keys = [], set()
        for request in there:
            key = request.arrival
            keys.add(key)
            look = self._look(request)
            if self._shown.get(key) != look:
                self._shown[key] = look
                changed.append(self._entry(request))
        gone = [key for key in self._shown if key not in keys]
        for key in gone:
            del self._shown[key]
        return changed, gone

    def _look(self, request: Request) -> tuple[Any, ...]:
        """What must differ for a request to be sent again."""
        row = -1 if request.sequence is None else request.row
        held = int(self._manager.table.pages[row]) if row >= 0 else 0
        tokens = request.known_tokens if self._every_token else 0
        return request.status, row, held, tokens, request.waits_on, request.preemptions, request.prefilling

    def _entry(self, request: Request) -> Frame:
        track = self.monitor.timings.tracks.get(request)
        running = request.status is Status.RUNNING
        row = request.row if running else -1
        return {
            "key": request.arrival,
            "id": request.id,
            "index": request.index,
            "state": ("prefill" if request.prefilling else "decode") if running else "waiting",
            "row": row,
            "pages": int(self._manager.table.pages[row]) if running else 0,
            "prompt": int(request.prompt.size),
            "tokens": request.known_tokens,
            "computed": request.computed,
            "cached": request.cached_tokens or 0,
            "waits_on": "" if running else request.waits_on,
            "needed": request.wait.needed if request.wait and not running else 0,
            "free": request.wait.free if request.wait and not running else 0,
            "preemptions": request.preemptions,
            "tenant": tenant_of(request.namespace),
            "queued": 0.0 if track is None else track.queued - self.monitor.started,
        }


def shown_name(namespace: Hashable) -> str:
    """A namespace in words: tenants by name; salts are secrets, and stay so."""
    if namespace is None:
        return "shared by all"
    tenant = tenant_of(namespace)
    if not tenant:
        return "a salt"
    salted = isinstance(namespace, tuple) and len(namespace) > 1 and namespace[1] is not None
    return f"{tenant}, salted" if salted else tenant
