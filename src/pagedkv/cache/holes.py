"""Holes: the free stretches of a pool that is handed out in contiguous pieces, first fit."""

from __future__ import annotations

Stretch = tuple[int, int]
"""(first page, pages)"""


class Holes:
    """Free stretches in order, no two adjacent. Knows nothing about who holds the rest.

    `stretches` is replaced and never changed in place, so that whoever kept it has the holes of then.
    """

    def __init__(self, num_pages: int) -> None:
        self.stretches: list[Stretch] = [(1, num_pages)]

    @property
    def free(self) -> int:
        """Pages in all holes."""
        return sum(pages for _, pages in self.stretches)

    @property
    def largest(self) -> int:
        """Pages of the largest hole."""
        return max((pages for _, pages in self.stretches), default=0)

    def take(self, pages: int) -> int | None:
        """The first page of the first hole that has room, taken from its front; None if none has."""
        return next((self.take_at(first, pages) for first, room in self.stretches if room >= pages), None)

    def take_at(self, first: int, pages: int) -> int | None:
        """Take the stretch that begins at page `first`, if a hole begins there and has room; None otherwise."""
        for place, (start, room) in enumerate(self.stretches):
            if start == first and room >= pages:
                rest = [(first + pages, room - pages)] if room > pages else []
                self.stretches = [*self.stretches[:place], *rest, *self.stretches[place + 1 :]]
                return first
        return None

    def give_back(self, stretches: list[Stretch]) -> None:
        """Merge stretches into the holes."""
        merged: list[Stretch] = []
        for first, pages in sorted(self.stretches + [stretch for stretch in stretches if stretch[1]]):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + pages)
            else:
                merged.append((first, pages))
        self.stretches = merged
