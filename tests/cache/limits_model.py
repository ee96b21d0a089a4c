"""The oracle's limits: floors and ceilings of namespaces, counted anew from all pages each time."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from retention_model import Page

from pagedkv.cache import Wait


class Limits:
    """What each namespace is sure of, and may use at most."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.of: dict[Hashable, tuple[int, int | None]] = {}

    def floor(self, name: Hashable) -> int:
        return self.of.get(name, (0, None))[0]

    def ceiling(self, name: Hashable) -> float:
        ceiling = self.of.get(name, (0, None))[1]
        return math.inf if ceiling is None else ceiling

    def set(self, name: Hashable, floor: int, ceiling: int | None) -> None:
        self.of.pop(name, None)
        if floor or ceiling is not None:
            self.of[name] = (floor, ceiling)
        self.keep_ceilings()

    def used(self, name: Hashable) -> int:
        owned = {id(page): page for row in self.model.rows.values() for page in row.pages}
        owned |= {id(page): page for pages in [*self.model.pins.values(), self.model.index.values()] for page in pages}
        return sum(page.namespace == name and page.owners > 0 for page in owned.values())

    def promised(self, name: Hashable, extra: list[Any] | None = None) -> int:
        rows = [*self.model.rows.values(), *(extra or [])]
        return sum(row.promise for row in rows if row.namespace == name)

    def refusal(self, demands: dict[Hashable, tuple[int, int]], needed: int, headroom: int = 0) -> Wait | None:
        """Why (pages taken, promises more) of each namespace break a limit."""
        for name, (taken, promised) in demands.items():
            room = max(self.ceiling(name) - self.used(name) - self.promised(name), 0)
            if taken + promised > room:
                return Wait(taken + promised, int(room), on="ceiling", namespace=name)
        taken = sum(taken for taken, _ in demands.values())
        before = self.model.available - self.obliged({})
        after = self.model.available - taken - self.obliged(demands) - headroom
        missing = min(before, 0) - after
        return Wait(needed, max(needed - missing, 0)) if missing > 0 and self.of else None

    def obliged(self, demands: dict[Hashable, tuple[int, int]], extra: list[Any] | None = None) -> int:
        total = self.model.promised + sum(row.promise for row in extra or [])
        total += sum(promised for _, promised in demands.values())
        for name in self.of:
            held = self.used(name) + self.promised(name, extra) + sum(demands.get(name, (0, 0)))
            total += max(self.floor(name) - held, 0)
        return total

    def promisable(self, name: Hashable, extra: list[Any]) -> float:
        if not self.of:
            return math.inf
        held = self.used(name) + self.promised(name, extra)
        room = max(self.model.available - self.obliged({}, extra), 0) + max(self.floor(name) - held, 0)
        return min(room, self.ceiling(name) - held)

    def victims(self, missing: int, takers: list[Hashable]) -> list[Page]:
        order = self.model.order
        chosen: list[Page] = []
        kept: list[Page] = []
        for name in self.of:
            own = [page for page in order if page.namespace == name]
            used = self.used(name) + takers.count(name)
            if name in takers and self.ceiling(name) < used + len(own):
                chosen += own[: used + len(own) - int(self.ceiling(name))]
            needed = max(self.floor(name) - used, 0)
            kept += own[max(len(own) - needed, 0) :]
        for page in [page for page in order if page not in kept] + [page for page in order if page in kept]:
            if len(chosen) < missing and page not in chosen:
                chosen.append(page)
        return [page for page in order if page in chosen]

    def keep_ceilings(self) -> None:
        for name in self.of:
            own = [page for page in self.model.order if page.namespace == name]
            excess = self.used(name) + len(own) - self.ceiling(name)
            for page in own[: int(max(min(excess, len(own)), 0))]:
                self.model.evict(page)
