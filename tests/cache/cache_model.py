"""The oracle of the stateful tests: the allocator again, with dictionaries, lists and loops, and no cleverness.

A page is an object, the index a dictionary from (namespace, all tokens up to the page's end) to the page, the eviction
order a list. What the array code must answer follows from these few lines.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from pagedkv.cache import Never, Wait

Key = tuple[Hashable, tuple[int, ...]]


@dataclass(eq=False)
class Page:
    """A page and the rows that own it."""

    owners: int = 1
    key: Key | None = None


@dataclass(eq=False)
class Row:
    """A sequence."""

    namespace: Hashable
    tokens: list[int]
    pages: list[Page]
    computed: int
    indexed: int
    promise: int
    full_prompt_pages: int = field(default=0)


class Model:
    """The allocator that KVCacheManager must agree with."""

    def __init__(self, num_pages: int, page_size: int, max_rows: int, caching: bool) -> None:
        self.num_pages, self.page_size, self.max_rows, self.caching = num_pages, page_size, max_rows, caching
        self.free = num_pages
        self.idle: list[Page] = []
        self.index: dict[Key, Page] = {}
        self.rows: dict[int, Row] = {}

    @property
    def available(self) -> int:
        return self.free + len(self.idle)

    @property
    def promised(self) -> int:
        return sum(row.promise for row in self.rows.values())

    def match(self, prompt: list[int], namespace: Hashable) -> list[Page]:
        found: list[Page] = []
        for end in range(self.page_size, len(prompt), self.page_size):
            page = self.index.get((namespace, tuple(prompt[:end])))
            if page is None:
                break
            found.append(page)
        return found

    def admit(
        self, prompt: list[int], namespace: Hashable, reserve: int, headroom: int, share_pending: bool
    ) -> Row | Wait | Never:
        whole = -(-(len(prompt) + reserve) // self.page_size)
        if whole > self.num_pages:
            return Never(whole, self.num_pages)
        if len(self.rows) == self.max_rows:
            return Wait(1, 0, on="rows")
        matched = self.match(prompt, namespace)
        if share_pending and self._pending(prompt, namespace, len(matched)):
            return Wait(1, 0, on="prefix")
        needed = whole - len(matched) + headroom
        free = self.available - self.promised - sum(page.owners == 0 for page in matched)
        if needed > free:
            return Wait(needed, max(free, 0))
        for page in matched:
            self._own(page)
        own = self._take(-(-len(prompt) // self.page_size) - len(matched))
        cached = len(matched) * self.page_size
        promise = whole - len(matched) - len(own)
        return Row(namespace, prompt, matched + own, cached, len(matched), promise, len(prompt) // self.page_size)

    def extend(self, numbers: list[int], tokens: list[list[int]]) -> Wait | Never | None:
        rows = [self.rows[number] for number in numbers]
        need = [
            -(-(len(row.tokens) + len(new)) // self.page_size) - len(row.pages)
            for row, new in zip(rows, tokens, strict=True)
        ]
        largest = max((len(row.pages) + more for row, more in zip(rows, need, strict=True)), default=0)
        if largest > self.num_pages:
            return Never(largest, self.num_pages)
        unpromised = sum(max(more - row.promise, 0) for row, more in zip(rows, need, strict=True))
        if unpromised > self.available - self.promised:
            return Wait(unpromised, self.available - self.promised)
        for row, new, pages in zip(rows, tokens, need, strict=True):
            row.promise -= min(row.promise, pages)
            row.tokens = row.tokens + new
            row.pages += self._take(pages)
        return None

    def commit(self, numbers: list[int], counts: list[int]) -> None:
        for number, count in zip(numbers, counts, strict=True):
            row = self.rows[number]
            row.computed += count
            while self.caching and (row.indexed + 1) * self.page_size <= row.computed:
                key = (row.namespace, tuple(row.tokens[: (row.indexed + 1) * self.page_size]))
                twin = self.index.get(key)
                if twin is None:
                    self.index[key] = row.pages[row.indexed]
                    row.pages[row.indexed].key = key
                else:
                    self._own(twin)
                    self.free += 1
                    row.pages[row.indexed] = twin
                row.indexed += 1

    def release(self, numbers: list[int]) -> None:
        for number in numbers:
            for page in reversed(self.rows.pop(number).pages):
                page.owners -= 1
                if page.owners == 0 and page.key is None:
                    self.free += 1
                elif page.owners == 0:
                    self.idle.append(page)

    def _pending(self, prompt: list[int], namespace: Hashable, matched: int) -> bool:
        end = (matched + 1) * self.page_size
        return (
            self.caching
            and end < len(prompt)
            and any(
                row.namespace == namespace
                and row.indexed < row.full_prompt_pages
                and matched < row.full_prompt_pages
                and row.tokens[:end] == prompt[:end]
                for row in self.rows.values()
            )
        )

    def _own(self, page: Page) -> None:
        if page.owners == 0:
            self.idle.remove(page)
        page.owners += 1

    def _take(self, count: int) -> list[Page]:
        while self.free < count:
            oldest = self.idle.pop(0)
            assert oldest.key is not None
            del self.index[oldest.key]
            self.free += 1
        self.free -= count
        return [Page() for _ in range(count)]
