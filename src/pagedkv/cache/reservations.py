"""Reservations: pages set aside for rows that were admitted with a reservation, and not drawn yet.

Counts pages, not page ids; knows nothing about where they come from. Whoever asks says how many are available.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.outcomes import Wait
from pagedkv.cache.table import Rows


class Reservations:
    """What has been promised to whom, as arrays.

    Attributes:
        promise: int32 [max_rows], pages set aside for the row and not drawn yet.
        entitled: int32 [max_rows], pages in all that the row's reservation is for; 0 without one.
        promised: sum of all promises.
    """

    def __init__(self, max_rows: int) -> None:
        self.promise = np.zeros(max_rows, np.int32)
        self.entitled = np.zeros(max_rows, np.int32)
        self.promised = 0

    def open(self, row: int, whole: int, held: int) -> None:
        """Promise a new row that holds `held` pages what it lacks of `whole`."""
        self.promise[row] = whole - held
        self.entitled[row] = whole if whole > held else 0
        self.promised += whole - held

    def close(self, rows: Rows) -> None:
        """Take all promises back."""
        self.promised -= int(self.promise[rows].sum())
        self.promise[rows] = self.entitled[rows] = 0

    def shortage(self, rows: Rows, drawn: NDArray[np.int64], available: int) -> Wait | None:
        """Why rows[i] cannot draw drawn[i] pages, its own promise first, while `available` pages can be handed out."""
        unpromised = int((drawn - np.minimum(self.promise[rows], drawn)).sum())
        free = available - self.promised
        return Wait(unpromised, free) if unpromised > free else None

    def draw(self, rows: Rows, drawn: NDArray[np.int64]) -> None:
        """rows[i] has drawn drawn[i] pages, from its promise as far as that reaches."""
        kept = np.minimum(self.promise[rows], drawn)
        self.promise[rows] -= kept.astype(np.int32)
        self.promised -= int(kept.sum())

    def settle(self, rows: Rows, held: NDArray[np.int32], copies: NDArray[np.bool_], available: int) -> None:
        """Promise each row with a reservation what it still may need, as far as pages are available.

        Args:
            rows: int64 [n].
            held: int32 [n], pages that each holds now.
            copies: bool [n], whether its next write takes a page for a copy.
            available: pages that can be handed out.
        """
        left = np.maximum(self.entitled[rows] - held, 0) + copies
        goal = np.where(self.entitled[rows] > 0, left, 0)
        had = self.promise[rows]
        kept = np.minimum(had, goal)
        self.promised -= int((had - kept).sum())
        want = goal - kept
        room = max(available - self.promised, 0)
        given = np.clip(room - (np.cumsum(want) - want), 0, want)
        self.promise[rows] = kept + given
        self.promised += int(given.sum())
