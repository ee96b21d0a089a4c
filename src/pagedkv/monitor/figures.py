"""Figures: the numbers of one moment, which metrics, the page map, alerts and `pagedkv top` all show."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.cache import KVCacheManager
from pagedkv.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from pagedkv.engine.engine import Engine  # brings torch, which whoever only shows figures does without

WAITS = ("turn", "pages", "rows", "prefix", "ceiling")
"""What a waiting request waits for; "turn" is that of the requests before it."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Where the pages are and who runs; pages unless said otherwise.

    Attributes:
        total, used, cached, free: used + cached + free = total.
        pinned: with at least one pin, of `used`.
        in_flight: of `used`, places of tokens whose keys and values are not computed yet, in whole pages.
        promised: set aside for rows that have a reservation, of cached + free.
        owned: references that rows hold; owned - used are saved by sharing.
        tokens: in used pages, shared ones counted once.
        page_size, page_bytes: tokens and bytes of a page.
        running, waiting: requests.
        waits: waiting requests by what they wait for.
    """

    total: int
    used: int
    cached: int
    free: int
    pinned: int
    in_flight: int
    promised: int
    owned: int
    tokens: int
    page_size: int
    page_bytes: int
    running: int
    waiting: int
    waits: dict[str, int]

    @property
    def saved(self) -> int:
        """Pages that sharing saves."""
        return self.owned - self.used

    @property
    def empty_slots(self) -> int:
        """Slots of used pages that hold no token: internal fragmentation."""
        return self.used * self.page_size - self.tokens


def figures(engine: Engine) -> Figures:
    """The figures of an engine now; whether or not a step is running. Costs a pass over the pages."""
    manager, scheduler = engine.paged, engine.scheduler
    usage = manager.usage()
    return Figures(
        total=usage.total,
        used=usage.used,
        cached=usage.cached,
        free=usage.free,
        pinned=manager.pins.held,
        in_flight=_in_flight(manager),
        promised=usage.promised,
        owned=usage.owned,
        tokens=usage.tokens,
        page_size=usage.page_size,
        page_bytes=engine.store.nbytes // (engine.store.num_pages + 1),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        waits=_waits(scheduler),
    )


def _in_flight(manager: KVCacheManager) -> int:
    """Pages of rows past what has been computed."""
    table = manager.table
    full = -(-table.computed // manager.page_size)
    return int((table.pages - full)[table.live].clip(0).sum())


def _waits(scheduler: Scheduler) -> dict[str, int]:
    counts = dict.fromkeys(WAITS, 0)
    for request in scheduler.waiting:
        counts[request.waits_on] += 1
    return counts


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """Pages and requests of one tenant, all its namespaces together."""

    used: int
    cached: int
    running: int
    waiting: int


def by_tenant(engine: Engine) -> dict[str, TenantUsage]:
    """Usage of each tenant that has pages, requests or limits; "" stands for everybody without a name."""
    manager, scheduler = engine.paged, engine.scheduler
    manager.index_filled()
    names = manager.namespaces.users()
    size = manager.namespaces.numbers + 1
    account = manager.pool.accounts.of
    used = np.bincount(account[manager.pool.refcount > 0], minlength=size)
    cached = np.bincount(account[manager.pool.queue.queued()], minlength=size)
    counts: dict[str, list[int]] = {"": [0, 0, 0, 0]}
    for root in names:
        found = counts.setdefault(tenant_of(manager.namespaces.name(root)), [0, 0, 0, 0])
        found[0] += int(used[-root])
        found[1] += int(cached[-root])
    for at, requests in ((2, scheduler.running), (3, scheduler.waiting)):
        for request in requests:
            counts.setdefault(tenant_of(request.namespace), [0, 0, 0, 0])[at] += 1
    return {name: TenantUsage(*found) for name, found in counts.items()}


def tenant_of(namespace: Hashable) -> str:
    """Who a namespace belongs to: the first part of a pair (tenant, salt); a salt alone is nobody's, and secret."""
    return str(namespace[0]) if isinstance(namespace, tuple) else ""
