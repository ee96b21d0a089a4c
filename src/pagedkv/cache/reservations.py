"""Reservations: pages set aside for rows that were admitted with a reservation, and not drawn yet.

Counts pages, not page ids; knows nothing about where they come from. Whoever asks says how many are available.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.journal import Journal
from pagedkv.cache.outcomes import Wait
from pagedkv.cache.table import Rows


class Reservations:
    """What has been promised to whom, as arrays.

    Attributes:
        promise: int32 [max_rows], pages set aside for the row and not drawn yet.
        entitled: int32 [max_rows], pages in all that the row's reservation is for; 0 without one.
        promised: sum of all promises.
    """

    def __init__(self, max_rows: int, journal: Journal) -> None:
        self.journal = journal
        self.promise = np.zeros(max_rows, np.int32)
        self.entitled = np.zeros(max_rows, np.int32)
        self.promised = 0

    def open(self, row: int, whole: int, held: int) -> None:
        """Entitle a new row that holds `held` pages to `whole`, and promise it what it lacks."""
        self.entitle(np.array([row]), whole)
        if whole > held:
            self._set(np.array([row]), np.array([whole - held]))

    def entitle(self, rows: Rows, whole: int) -> None:
        """The reservation of these rows is for `whole` pages in all; `settle` makes the promises."""
        self.journal.put(self.entitled, rows, whole)

    def close(self, rows: Rows) -> None:
        """Take all promises back."""
        if self.entitled.take(rows).any():
            self._set(rows, np.zeros(rows.size, np.int64))
            self.entitle(rows, 0)

    def shortage(self, rows: Rows, drawn: NDArray[np.int64], available: int) -> Wait | None:
        """Why rows[i] cannot draw drawn[i] pages, its own promise first, while `available` pages can be handed out."""
        total = int(drawn.sum())
        if total > available - self.promised:
            unpromised = total - int(np.minimum(self.promise.take(rows), drawn).sum())
            if unpromised > available - self.promised:
                return Wait(unpromised, available - self.promised)
        return None

    def draw(self, rows: Rows, drawn: NDArray[np.int64]) -> None:
        """rows[i] has drawn drawn[i] pages, from its promise as far as that reaches."""
        if self.promised:
            had = self.promise.take(rows)
            self._set(rows, had - np.minimum(had, drawn))

    def settle(self, rows: Rows, held: NDArray[np.int32], copies: NDArray[np.bool_], available: int) -> None:
        """Promise each row with a reservation what it still may need, as far as pages are available.

        Args:
            rows: int64 [n].
            held: int32 [n], pages that each holds now.
            copies: bool [n], whether its next write takes a page for a copy.
            available: pages that can be handed out.
        """
        entitled = self.entitled.take(rows)
        if not entitled.any():
            return
        left = np.maximum(entitled - held, 0) + copies
        self.aim(rows, np.where(entitled > 0, left, 0), available)

    def aim(self, rows: Rows, goal: NDArray[np.integer], available: int) -> None:
        """Promise rows[i] goal[i] pages, as far as pages are available: those first that are promised already."""
        had = self.promise.take(rows)
        kept = np.minimum(had, goal)
        want = goal - kept
        room = max(available - self.promised + int((had - kept).sum()), 0)
        given = np.clip(room - (np.cumsum(want) - want), 0, want)
        self._set(rows, kept + given)

    def _set(self, rows: Rows, promises: NDArray[np.integer]) -> None:
        """Promise rows[i] promises[i] pages from now on."""
        self.journal.keep(self, "promised")
        before = self.promise.take(rows)
        self.journal.replace(self.promise, rows, before, promises)
        self.promised += int(promises.sum()) - int(before.sum())
