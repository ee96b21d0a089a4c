"""The oracle of the stateful tests: the allocator again, with dictionaries, lists and loops, and no cleverness.

A page is an object, the index a dictionary from (namespace, all tokens up to the page's end) to the page, the eviction
order a list. What the array code must answer follows from these few lines.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from limits_model import Limits
from retention_model import DEFAULT, Clock, Key, Page

from pagedkv.cache import Never, Retention, Wait

Wishes = tuple[Retention, ...]


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
    entitled: int = 0
    shares: bool = False
    barred: bool = False
    wishes: Wishes = ()


class Model:
    """The allocator that KVCacheManager must agree with."""

    def __init__(self, num_pages: int, page_size: int, max_rows: int, caching: bool, partial: bool = False) -> None:
        self.num_pages, self.page_size, self.max_rows, self.caching = num_pages, page_size, max_rows, caching
        self.partial = partial
        self.free = num_pages
        self.idle: list[Page] = []
        self.index: dict[Key, Page] = {}
        self.rows: dict[int, Row] = {}
        self.pins: dict[int, list[Page]] = {}
        self.clock = Clock()
        self.limits = Limits(self)

    @property
    def order(self) -> list[Page]:
        """Cached pages in the order of eviction."""
        return sorted(self.idle, key=lambda page: page.level)

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

    def part(self, prompt: list[int], namespace: Hashable, matched: int) -> int:
        """Most tokens after the match with which some cached page goes on, at least one token left out."""
        shared = prompt[: matched * self.page_size]
        rest = prompt[len(shared) : -1]
        ends = [
            key[1][len(shared) :] for key in self.index if key[0] == namespace and list(key[1][: len(shared)]) == shared
        ]
        nexts = [end for end in ends if len(end) == self.page_size]
        common = [
            next((i for i, (a, b) in enumerate(zip(end, rest, strict=False)) if a != b), min(len(end), len(rest)))
            for end in nexts
        ]
        return max(common, default=0) if self.partial else 0

    def admit(
        self,
        prompt: list[int],
        namespace: Hashable,
        reserve: int,
        headroom: int,
        share_pending: bool,
        retention: Wishes = (),
        reuse: bool = True,
    ) -> Row | Wait | Never:
        whole = -(-(len(prompt) + reserve) // self.page_size)
        if whole > self.num_pages:
            return Never(whole, self.num_pages)
        if len(self.rows) == self.max_rows:
            return Wait(1, 0, on="rows")
        matched = self.match(prompt, namespace) if reuse else []
        if share_pending and self._pending(prompt, namespace, len(matched)):
            return Wait(1, 0, on="prefix")
        if whole > self.limits.ceiling(namespace):
            return Never(whole, int(self.limits.ceiling(namespace)))
        needed = whole - len(matched) + headroom
        idle = sum(page.owners == 0 for page in matched)
        free = self.available - self.promised - idle
        if needed > free:
            return Wait(needed, max(free, 0))
        fresh = -(-len(prompt) // self.page_size) - len(matched)
        refusal = self.limits.refusal({namespace: (fresh + idle, needed - headroom - fresh)}, needed, headroom)
        if refusal is not None:
            return refusal
        part = self.part(prompt, namespace, len(matched)) if reuse else 0
        for page in matched:
            self._own(page)
        own = self._take([namespace] * fresh)
        self.clock.start(bool(retention), self.index.values())
        cached = len(matched) * self.page_size + part
        promise = whole - len(matched) - len(own)
        full, entitled = len(prompt) // self.page_size, whole if reserve else 0
        return Row(
            namespace, prompt, matched + own, cached, len(matched), promise, full, entitled, wishes=tuple(retention)
        )

    def extend(self, numbers: list[int], tokens: list[list[int]]) -> Wait | Never | None:
        rows = [self.rows[number] for number in numbers]
        need = [
            -(-(len(row.tokens) + len(new)) // self.page_size) - len(row.pages)
            for row, new in zip(rows, tokens, strict=True)
        ]
        largest = max((len(row.pages) + more for row, more in zip(rows, need, strict=True)), default=0)
        if largest > self.num_pages:
            return Never(largest, self.num_pages)
        for row, more in zip(rows, need, strict=True):
            if more and len(row.pages) + more > self.limits.ceiling(row.namespace):
                return Never(len(row.pages) + more, int(self.limits.ceiling(row.namespace)))
        copying = self._copying(rows, tokens)
        drawn = [more + (number in copying) for number, more in enumerate(need)]
        unpromised = sum(max(more - row.promise, 0) for row, more in zip(rows, drawn, strict=True))
        if unpromised > self.available - self.promised:
            return Wait(unpromised, self.available - self.promised)
        demands: dict[Hashable, tuple[int, int]] = {}
        for row, more in zip(rows, drawn, strict=True):
            if more:
                taken, promised = demands.get(row.namespace, (0, 0))
                demands[row.namespace] = (taken + more, promised - min(row.promise, more))
        refusal = self.limits.refusal(demands, unpromised)
        if refusal is not None:
            return refusal
        takers = [rows[n] for n in copying] + [row for row, more in zip(rows, need, strict=True) for _ in range(more)]
        fresh = self._take([row.namespace for row in takers])[::-1]
        copies = [(number, fresh.pop()) for number in copying]
        for number, (row, new) in enumerate(zip(rows, tokens, strict=True)):
            row.promise -= min(row.promise, drawn[number])
            row.tokens = row.tokens + new
            row.pages += [fresh.pop() for _ in range(need[number])]
        for number in copying:
            self.clock.claim(rows[number], self.page_size)
        shared = []
        for number, copy in copies:
            old = rows[number].pages
            at = (len(rows[number].tokens) - len(tokens[number])) // self.page_size
            shared.append(old[at])
            old[at] = copy
        self._drop_all(shared)
        written = [row for row, new in zip(rows, tokens, strict=True) if new and row.shares]
        for row in written:
            row.shares = False
        self._settle(written)
        return None

    def _copying(self, rows: list[Row], tokens: list[list[int]]) -> list[int]:
        """Which of the rows write into a partly filled page that is not theirs alone, and must copy it."""
        writers = [n for n, row in enumerate(rows) if tokens[n] and len(row.tokens) % self.page_size]
        tails = {n: rows[n].pages[len(rows[n].tokens) // self.page_size] for n in writers}
        copying: list[int] = []
        kept: list[Page] = []
        for n, page in tails.items():
            together = sum(other is page for other in tails.values())
            if page.key is None and together == page.owners and page not in kept:
                kept.append(page)
            else:
                copying.append(n)
        return copying

    def fork(self, number: int, branches: int, reserve: int) -> list[Row] | Wait:
        row = self.rows[number]
        if branches > self.max_rows - len(self.rows):
            return Wait(branches, self.max_rows - len(self.rows), on="rows")
        partial = bool(len(row.tokens) % self.page_size)
        entitled = -(-(len(row.tokens) + reserve) // self.page_size) if reserve else 0
        needed = branches * (entitled - len(row.pages) + partial) if reserve else 0
        if partial and row.entitled and not row.shares:
            needed += 1
        if needed > self.available - self.promised:
            return Wait(needed, self.available - self.promised)
        refusal = self.limits.refusal({row.namespace: (0, needed)}, needed)
        if refusal is not None:
            return refusal
        new = [
            replace(row, pages=list(row.pages), promise=0, full_prompt_pages=0, entitled=entitled, shares=partial)
            for _ in range(branches)
        ]
        for page in row.pages:
            page.owners += branches
        row.shares = partial
        self._settle([*new, row], extra=new)
        return new

    def reorder(self, numbers: list[int], parents: list[int]) -> None:
        pairs = [(number, parent) for number, parent in zip(numbers, parents, strict=True) if number != parent]
        old = {number: self.rows[number].pages for number, _ in pairs}
        new = {number: self.rows[parent] for number, parent in pairs}
        states = {
            n: (r.namespace, r.tokens, list(r.pages), r.computed, r.indexed, r.barred, r.wishes) for n, r in new.items()
        }
        for state in states.values():
            for page in state[2]:
                self._own(page)
        for number in states:
            self.clock.claim(self.rows[number], self.page_size)
        for number, state in states.items():
            row = self.rows[number]
            row.namespace, row.tokens, row.pages, row.computed, row.indexed, row.barred, row.wishes = state
            row.full_prompt_pages = 0
        self._drop_all([page for pages in old.values() for page in reversed(pages)])
        self._mark_and_settle(sorted({n for pair in pairs for n in pair}))

    def trim(self, numbers: list[int], lengths: list[int]) -> None:
        dropped = []
        for number, length in zip(numbers, lengths, strict=True):
            row = self.rows[number]
            self.clock.claim(row, self.page_size)
            row.tokens = row.tokens[:length]
            row.computed = min(row.computed, length)
            row.indexed = min(row.indexed, length // self.page_size)
            row.full_prompt_pages = min(row.full_prompt_pages, length // self.page_size)
            while len(row.pages) > -(-length // self.page_size):
                dropped.append(row.pages.pop())
        self._drop_all(dropped)
        self._mark_and_settle(numbers)

    def reset(self, names: list[Hashable]) -> tuple[int, int]:
        """Forget what these namespaces have indexed; returns (pages dropped, pages held)."""
        dropped = held = 0
        for key in [key for key in self.index if key[0] in names]:
            page = self.index.pop(key)
            page.key = None
            if page.owners:
                held += 1
            else:
                self.idle.remove(page)
                self.free += 1
                dropped += 1
        for row in self.rows.values():
            if row.namespace in names:
                row.indexed, row.full_prompt_pages, row.barred = 0, 0, True
        return dropped, held

    def pin(self, tokens: list[int], namespace: Hashable) -> list[Page] | Wait:
        pages = self.match([*tokens, 0], namespace)
        idle = sum(page.owners == 0 for page in pages)
        if idle > self.available - self.promised:
            return Wait(idle, self.available - self.promised)
        refusal = self.limits.refusal({namespace: (idle, 0)}, idle)
        if refusal is not None:
            return refusal
        for page in pages:
            self._own(page)
        return pages

    def hold(self, number: int) -> list[Page] | Wait:
        row = self.rows[number]
        partial = bool(len(row.tokens) % self.page_size)
        needed = int(partial and row.entitled > 0 and not row.shares)
        if needed > self.available - self.promised:
            return Wait(needed, self.available - self.promised)
        refusal = self.limits.refusal({row.namespace: (0, needed)}, needed)
        if refusal is not None:
            return refusal
        for page in row.pages:
            self._own(page)
        row.shares = partial
        self._settle([row])
        return list(row.pages)

    def unpin(self, number: int) -> None:
        self._drop_all(self.pins.pop(number, [])[::-1])

    def resize(self, wanted: int) -> int:
        """The pool has so many pages now."""
        used = self.num_pages - self.free - len(self.idle)
        size = max(wanted, min(used + self.limits.obliged({}), self.num_pages))
        for page in self.limits.victims(used + len(self.idle) - size, []):
            self.evict(page)
        self.free += size - self.num_pages
        self.num_pages = size
        return size

    def tick(self, now: float) -> int:
        self.clock.now = max(now, self.clock.now)
        over = [page for page in self.order if page.level > DEFAULT and page.end <= self.clock.now]
        for page in over:
            self.idle.remove(page)
            page.level = DEFAULT
            self.idle.append(page)
        return len(over)

    def pinned_alone(self) -> list[Page]:
        """Pages that pins own and nobody else."""
        pinned = [page for pages in self.pins.values() for page in pages]
        return [page for n, page in enumerate(pinned) if page not in pinned[:n] and pinned.count(page) == page.owners]

    def _mark_and_settle(self, numbers: list[int]) -> None:
        rows = [self.rows[number] for number in numbers]
        for row in rows:
            tail = row.pages[-1]
            row.shares = bool(len(row.tokens) % self.page_size) and (tail.owners > 1 or tail.key is not None)
        self._settle(rows)

    def _settle(self, rows: list[Row], extra: list[Row] | None = None) -> None:
        """Promises follow what each row with a reservation may still need, as far as pages are there."""
        goals = [max(row.entitled - len(row.pages), 0) + row.shares if row.entitled else 0 for row in rows]
        for row, goal in zip(rows, goals, strict=True):
            row.promise = min(row.promise, goal)
        unlisted = extra or []  # rows that are not in self.rows yet
        for row, goal in zip(rows, goals, strict=True):
            promised = self.promised + sum(row.promise for row in unlisted)
            room = max(min(self.available - promised, self.limits.promisable(row.namespace, unlisted)), 0)
            row.promise += min(goal - row.promise, room)

    def commit(self, numbers: list[int], counts: list[int]) -> None:
        for number, count in zip(numbers, counts, strict=True):
            row = self.rows[number]
            row.computed += count
        for number in sorted(numbers):
            row = self.rows[number]
            while self.caching and not row.barred and (row.indexed + 1) * self.page_size <= row.computed:
                key = (row.namespace, tuple(row.tokens[: (row.indexed + 1) * self.page_size]))
                twin = self.index.get(key)
                if twin is not None and row.pages[row.indexed].owners > 1:  # held: it cannot give its own page up
                    row.barred, row.full_prompt_pages = True, 0
                    break
                if twin is None:
                    self.index[key] = row.pages[row.indexed]
                    row.pages[row.indexed].key = key
                else:
                    self._own(twin)
                    self.free += 1
                    row.pages[row.indexed] = twin
                row.indexed += 1

    def release(self, numbers: list[int]) -> None:
        if self.partial:
            for row in [self.rows[number] for number in numbers]:
                self._index_end(row)
        for number in numbers:
            self.clock.claim(self.rows[number], self.page_size)
        self._drop_all([page for number in numbers for page in reversed(self.rows.pop(number).pages)])

    def _index_end(self, row: Row) -> None:
        """The last page, though not full, may serve other prompts: -1 stands where it has no token."""
        full, filled = divmod(row.computed, self.page_size)
        if filled and not row.barred and row.indexed == full:
            page = row.pages[full]
            key = (row.namespace, tuple(row.tokens[: row.computed] + [-1] * (self.page_size - filled)))
            if page.owners == 1 and page.key is None and key not in self.index:
                page.key, self.index[key] = key, page

    def _drop_all(self, pages: list[Page]) -> None:
        """Each loses an owner, in this order; a page that occurs several times counts where it occurs last."""
        for page in pages:
            page.owners -= 1
        for at, page in enumerate(pages):
            if page.owners or page in pages[at + 1 :]:
                continue
            if page.key is None:
                self.free += 1
            else:
                page.level = self.clock.level(page)
                self.idle.append(page)
        self.limits.keep_ceilings()

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

    def _take(self, names: list[Hashable]) -> list[Page]:
        """A page for each of these namespaces."""
        for page in self.limits.victims(len(names) - self.free, names):
            self.evict(page)
        self.free -= len(names)
        return [Page(name) for name in names]

    def evict(self, page: Page) -> None:
        self.idle.remove(page)
        assert page.key is not None
        del self.index[page.key]
        self.free += 1
