"""The oracle's page, and how long it is worth keeping: retention told again with loops."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from pagedkv.cache import Retention

Key = tuple[Hashable, tuple[int, ...]]
DEFAULT = 35


@dataclass(eq=False)
class Page:
    """A page, whose it is, how many own it, and how it ranks."""

    namespace: Hashable
    owners: int = 1
    key: Key | None = None
    priority: int = -1
    end: float = -math.inf
    level: int = DEFAULT


class Clock:
    """Priorities and their ends."""

    def __init__(self) -> None:
        self.now = -math.inf
        self.used = False

    def start(self, asked: bool, indexed: Iterable[Page]) -> None:
        """From the first wish on, pages have a priority; those that are in the index by then, the default."""
        if asked and not self.used:
            self.used = True
            for page in indexed:
                page.priority = DEFAULT

    def claim(self, row: Any, page_size: int) -> None:
        """Rank the row's pages that prompts may find, from the last to the first."""
        if not self.used:
            return
        priority, end = -1, -math.inf
        for column, page in reversed(list(enumerate(row.pages))):
            if page.key is None:
                continue
            wished = [wish for wish in row.wishes if touches(wish, column, page_size)]
            asked = max((wish.priority for wish in wished), default=DEFAULT)
            until = max((self.until(wish) for wish in wished if wish.priority > DEFAULT), default=-math.inf)
            if page.end <= self.now:
                page.priority, page.end = min(page.priority, DEFAULT), -math.inf
            priority = max(priority, asked, page.priority)
            end = max(end, until, page.end)
            page.priority, page.end = priority, end

    def until(self, wish: Retention) -> float:
        return math.inf if wish.ttl is None else self.now + wish.ttl

    def level(self, page: Page) -> int:
        """Where an idle page stands in the queue."""
        if not self.used:
            return DEFAULT
        return page.priority if page.end > self.now else min(page.priority, DEFAULT)


def touches(wish: Retention, column: int, page_size: int) -> bool:
    """Is one of the page's places in the wish's range?"""
    return wish.start < (column + 1) * page_size and (wish.end is None or wish.end > column * page_size)
