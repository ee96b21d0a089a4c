"""WaitingQueue: requests in the order in which they are to be admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from pagedkv.engine.request import Request

_Key = tuple[int, bool, int]


class WaitingQueue:
    """A sorted list. Preempted requests go before others of their priority, then the earlier arrival goes first.

    Args:
        by_priority: order by `Request.priority` first (smaller goes first); otherwise all priorities are equal.
    """

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._entries: list[tuple[_Key, Request]] = []
        self.prompt_tokens = 0
        """Tokens of the prompts that wait."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Those that wait now, in order; the queue may change meanwhile."""
        return (request for _, request in self._entries.copy())

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._entries, (self._key(request), request), key=_key_of)
        self.prompt_tokens += request.prompt.size

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        del self._entries[bisect_left(self._entries, self._key(request), key=_key_of)]
        self.prompt_tokens -= request.prompt.size

    def _key(self, request: Request) -> _Key:
        return (request.priority if self._by_priority else 0, request.preemptions == 0, request.arrival)


def _key_of(entry: tuple[_Key, Request]) -> _Key:
    return entry[0]
