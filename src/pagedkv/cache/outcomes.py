"""What the verbs of a manager answer, and the verbs themselves.

"Not now" and "never" are different answers: `Wait` may succeed once others have released pages, `Never` cannot succeed
in this pool at all. A refusal of either kind has changed nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.cache.table import PageTable

NO_COPIES: NDArray[np.int32] = np.zeros((0, 2), np.int32)


class Sequence(NamedTuple):
    """A handle on one row of the page table. Rows are reused; the generation tells an old handle from a new one."""

    row: int
    generation: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The prompt has its pages. The first `cached_tokens` of its tokens need not be computed.

    Attributes:
        sequence: the row.
        cached_tokens: whole pages that are shared, and the part of a page in `copies`.
        copies: int32 [pairs, 2], as in `Extended`: a page whose first tokens are the prompt's, copied, not shared.
    """

    sequence: Sequence
    cached_tokens: int
    copies: NDArray[np.int32] = field(default_factory=lambda: NO_COPIES, compare=False)


@dataclass(frozen=True, slots=True)
class Extended:
    """The new tokens have their places.

    Attributes:
        slots: int64 [tokens], page * page_size + offset.
        copies: int32 [pairs, 2], (source, target) pages whose keys and values the store must copy, all at once (reads
            before writes), before anything is written.
    """

    slots: NDArray[np.int64]
    copies: NDArray[np.int32] = field(default_factory=lambda: NO_COPIES)


@dataclass(frozen=True, slots=True)
class Forked:
    """The branches that now share all pages of the row they were forked from."""

    sequences: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now.

    Attributes:
        needed: pages (or rows) that the call needs beyond what it already holds or shares.
        free: how many there are now for it.
        on: what is short. "prefix" means that a running row is just computing the next page of this very prompt;
            "ceiling", that the pages are there but `namespace` may not use more.
        namespace: whose ceiling it is.
    """

    needed: int
    free: int
    on: Literal["pages", "rows", "prefix", "ceiling"] = "pages"
    namespace: Hashable = None


@dataclass(frozen=True, slots=True)
class Never:
    """Not in this pool or under this ceiling, however empty: `needed` pages against a `capacity` for one row."""

    needed: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the pages are. used + cached + free = total; the null page is not counted.

    Attributes:
        total: usable pages of the pool.
        used: pages that at least one row or pin owns.
        cached: pages without an owner that the prefix index can still serve; evictable.
        free: pages that hold nothing.
        promised: pages of cached + free that are set aside for rows admitted with a reservation.
        owned: page references held by rows, and pages that only pins own; owned - used pages are saved by sharing.
        tokens: tokens held in used pages, shared ones counted once.
        page_size: tokens per page.
    """

    total: int
    used: int
    cached: int
    free: int
    promised: int
    owned: int
    tokens: int
    page_size: int

    @property
    def saved(self) -> int:
        """Pages that sharing saves: what the rows would take beyond `used` if each had its own copy."""
        return self.owned - self.used

    @property
    def waste(self) -> float:
        """Share of the used pages' slots that hold no token, 0 to 1."""
        return 1.0 - self.tokens / (self.used * self.page_size) if self.used else 0.0


class CacheManager(Protocol):
    """The verbs an engine needs. KVCacheManager pages; ContiguousManager reserves, for comparison."""

    page_size: int
    num_pages: int
    max_seq_len: int
    table: PageTable

    def admit(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        reserve: int = 0,
        headroom: int = 0,
        owner: str = "",
        share_pending: bool = False,
    ) -> Admitted | Wait | Never:
        """Give a prompt its row and pages."""
        ...

    def extend(self, rows: ArrayLike, tokens: ArrayLike, counts: ArrayLike = 1) -> Extended | Wait | Never:
        """Append tokens to rows."""
        ...

    def commit(self, rows: ArrayLike, counts: ArrayLike) -> None:
        """Say that keys and values of the next `counts` tokens of each row have been computed."""
        ...

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Give back rows and pages; handles already released are ignored."""
        ...

    def private_pages(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Pages of each row that nobody else owns: what releasing that row alone would bring."""
        ...

    def usage(self) -> Usage:
        """Where the pages are now."""
        ...
