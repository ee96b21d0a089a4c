"""What the allocator's tests share: a tiny pool, a snapshot of all that a manager knows, and readers of its arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache import Admitted, ChainHash, EventKind, KVCacheManager, Sequence, check
from pagedkv.cache.pool import PagePool
from pagedkv.cache.windowed import WindowedGroup

PAGE = 4


class NarrowHash(ChainHash):
    """Keys of which only a few bits are kept, so that different pages collide all the time."""

    def __init__(self, bits: int) -> None:
        super().__init__(seed=7)
        self.kept = np.uint64((1 << bits) - 1)

    def finish(self, sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return super().finish(sums) & self.kept


def tiny(num_pages: int = 4, page_size: int = PAGE, **changes: Any) -> KVCacheManager:
    """A manager of 4 pages of 4 tokens with 4 rows, whose keys are the same in every run."""
    settings: dict[str, Any] = {"max_rows": 4, "max_seq_len": 64, "hasher": ChainHash(seed=1)}
    return KVCacheManager(num_pages, page_size, **(settings | changes))


def admitted(manager: KVCacheManager, tokens: Any, **options: Any) -> Admitted:
    """Admit a prompt that must be admitted."""
    answer = manager.admit(tokens, **options)
    assert isinstance(answer, Admitted), answer
    check(manager)
    return answer


def computed(manager: KVCacheManager, tokens: Any, **options: Any) -> Admitted:
    """Admit a prompt and commit all of it."""
    answer = admitted(manager, tokens, **options)
    row = answer.sequence.row
    manager.commit([row], [int(manager.table.length[row]) - answer.cached_tokens])
    check(manager)
    return answer


def served(manager: KVCacheManager, tokens: Any, **options: Any) -> int:
    """Run a prompt from admission to its end; returns the tokens that were cached."""
    answer = computed(manager, tokens, **options)
    manager.release([answer.sequence])
    check(manager)
    return answer.cached_tokens


def pages(manager: KVCacheManager, sequence: Sequence) -> list[int]:
    """The page ids of a sequence."""
    return manager.table.table[sequence.row, : manager.table.pages[sequence.row]].tolist()


def noted_tokens(manager: KVCacheManager) -> NDArray[np.int32]:
    """What the index will have noted for each page, once the tokens of the last decode steps are there too."""
    tokens, recent = manager.index.tokens.copy(), manager.recent
    for step in range(recent.steps):
        tokens.reshape(-1)[recent.slots[step]] = recent.ids[step]
    return tokens


def held_tokens(manager: KVCacheManager, row: int) -> list[int]:
    """The tokens that have been noted for a row, read through its page table."""
    length = int(manager.table.length[row])
    return noted_tokens(manager)[manager.table.table[row]].reshape(-1)[:length].tolist()


def resident(manager: KVCacheManager) -> dict[int, tuple[int, tuple[int, ...]]]:
    """For every indexed page: the root of its chain, and all tokens from there to the page's end."""
    index = manager.index
    found = {}
    for page in np.flatnonzero(index.indexed[1:]) + 1:
        chain: list[int] = []
        at = int(page)
        while at > 0:
            chain[:0] = index.tokens[at].tolist()
            at = int(index.parent[at])
        found[int(page)] = (at, tuple(chain))
    return found


def split(manager: KVCacheManager) -> tuple[int, int, int]:
    """(used, cached, free) pages, after checking that they add up."""
    usage = manager.usage()
    assert min(usage.used, usage.cached, usage.free) >= 0
    assert usage.used + usage.cached + usage.free == usage.total
    return usage.used, usage.cached, usage.free


def assert_named(found: list[str], sentence: str) -> None:
    """Does an auditor say this?"""
    assert any(sentence in violation for violation in found), found


class Follower:
    """Knows of a manager only the events that it reads, and from them who owns what and what is indexed."""

    def __init__(self, manager: KVCacheManager, capacity: int = 1 << 14) -> None:
        self.events = manager.events
        self.events.start(capacity)
        self.read = 0
        self.owners: dict[int, int] = {}
        self.parents: dict[int, int] = {}

    def follow(self) -> None:
        """Read what has happened since."""
        batch = self.events.read(self.read)
        assert (batch.first, batch.lost) == (self.read, 0)
        self.read += batch.kind.size
        for kind, page, other in zip(batch.kind.tolist(), batch.page.tolist(), batch.other.tolist(), strict=True):
            self.apply(EventKind(kind), page, other)
        self.owners = {page: count for page, count in self.owners.items() if count}

    def apply(self, kind: EventKind, page: int, other: int) -> None:
        """One event, and what must have been so before it."""
        owners = self.owners.get(page, 0)
        if kind == EventKind.ALLOCATED:
            assert owners == 0
            assert page not in self.parents
            self.owners[page] = 1
        elif kind == EventKind.SHARED:
            assert owners or page in self.parents, "a free page cannot be shared"
            self.owners[page] = owners + 1
        elif kind == EventKind.RELEASED:
            assert owners
            self.owners[page] = owners - 1
        elif kind == EventKind.INDEXED:
            assert owners
            assert page not in self.parents
            assert other < 0 or other in self.parents
            self.parents[page] = other
        elif kind == EventKind.FORGOTTEN:
            del self.parents[page]
        elif kind == EventKind.EVICTED:
            assert owners == 0
            assert page not in self.parents
        elif kind == EventKind.MOVED:
            assert other not in self.parents
            if page in self.parents:
                self.parents[other] = self.parents.pop(page)
            self.parents = {at: other if above == page else above for at, above in self.parents.items()}
            self.owners[other] = self.owners.pop(page, 0)

    def agrees_with(self, manager: KVCacheManager) -> None:
        """Is what was read all that there is?"""
        self.follow()
        owned = np.flatnonzero(manager.pool.refcount).tolist()
        assert self.owners == {page: int(manager.pool.refcount[page]) for page in owned}
        indexed = np.flatnonzero(manager.index.indexed[1:]) + 1
        assert self.parents == {page: int(manager.index.parent[page]) for page in indexed.tolist()}


def state_of(manager: Any) -> Any:
    """`snapshot` to the last bit, without indexing anything first.

    Of the tokens of a page only those count that a row or the index can see.
    """
    state = {name: snapshot(value) for name, value in vars(manager).items() if name not in UNSEEN}
    if isinstance(manager, KVCacheManager):
        index, seen = manager.index, {}
        for row in np.flatnonzero(manager.table.live).tolist():
            seen[row] = held_tokens(manager, row)
        state["tokens"] = [seen, {page: index.tokens[page].tolist() for page in np.flatnonzero(index.indexed).tolist()}]
        state["index"] = {name: snapshot(v) for name, v in vars(index).items() if name not in (*UNSEEN, "tokens")}
        for name in ("key", "parent", "next"):
            state["index"][name] = snapshot(np.where(index.indexed, getattr(index, name), 0))
    if isinstance(manager, KVCacheManager | WindowedGroup):
        state["pool"] = pool_state(manager.pool)
    return state


def pool_state(pool: PagePool) -> Any:
    """The pool without what lies beyond the ends of its stack and its lines."""
    state = {name: snapshot(value) for name, value in vars(pool).items() if name not in (*UNSEEN, "stack", "queue")}
    queue = {name: snapshot(value) for name, value in vars(pool.queue).items() if name not in (*UNSEEN, "lines")}
    lines = {
        level: (line.head, line.tail, line.entries[: line.tail].tolist()) for level, line in pool.queue.lines.items()
    }
    return [state, pool.stack[: pool.free].tolist(), queue, lines]


UNSEEN = ("hasher", "_spare", "_spares", "journal", "_checked", "_index", "_pool", "_accounts", "recent", "followers")


def snapshot(thing: Any) -> Any:
    """Everything a manager knows, as values that can be compared.

    Left out: the hasher, whose salts only grow; numbers of roots that have no name now; the journal; the rows that
    were checked last; how many decode steps' tokens wait to be noted. Pages that wait to be indexed are indexed first.
    """
    if isinstance(thing, KVCacheManager):
        thing.usage()  # as every verb that looks
    if isinstance(thing, np.ndarray):
        return (thing.dtype.str, thing.shape, thing.tobytes())
    if isinstance(thing, dict):
        return {key: snapshot(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [snapshot(value) for value in thing]
    if hasattr(thing, "__dict__"):
        return {name: snapshot(value) for name, value in vars(thing).items() if name not in UNSEEN}
    return thing
