"""The state of every page of a pool, and how a map of them is drawn with characters.

Each state has a colour and a shape of its own, so that the map can be read without colours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from pagedkv.cache import CacheManager, KVCacheManager


@dataclass(frozen=True, slots=True)
class PageState:
    """How pages of one state are drawn."""

    name: str
    glyph: str
    style: str


STATES = (
    PageState("free", "·", "bright_black"),
    PageState("cached", "o", "blue"),
    PageState("reserved, still empty", "-", "red"),
    PageState("used", "█", "green"),
    PageState("shared", "▒", "yellow"),
)
FREE, CACHED, EMPTY, USED, SHARED = range(len(STATES))


def page_states(manager: CacheManager) -> NDArray[np.uint8]:
    """State of the pages 1 to num_pages, as indices into STATES: uint8 [num_pages]."""
    states = np.full(manager.num_pages + 1, FREE, np.uint8)
    table = manager.table
    for row in np.flatnonzero(table.live).tolist():
        pages = table.table[row, : table.pages[row]]
        filled = -(-int(table.length[row]) // manager.page_size)
        states[pages[:filled]] = USED
        states[pages[filled:]] = EMPTY
    if isinstance(manager, KVCacheManager):
        states[manager.pool.refcount > 1] = SHARED
        states[manager.pool.queue.queued()] = CACHED
    return states[1:]


def draw(states: NDArray[np.uint8], width: int, height: int) -> Text:
    """The map as at most `height` lines of `width` characters.

    If there are more pages than characters, each stands for several and shows the most noteworthy state among them:
    shared, then used, empty, cached, free.
    """
    per_cell = max(1, -(-states.size // (width * height)))
    padding = -states.size % per_cell
    cells = np.concatenate((states, np.zeros(padding, np.uint8))).reshape(-1, per_cell).max(axis=1)
    text = Text()
    for start in range(0, cells.size, width):
        line = cells[start : start + width]
        edges = np.flatnonzero(np.diff(line)) + 1
        for run in np.split(line, edges):
            state = STATES[int(run[0])]
            text.append(state.glyph * run.size, style=state.style)
        text.append("\n")
    text.rstrip()
    return text


def legend(states: NDArray[np.uint8]) -> Text:
    """What the characters mean, and how many pages are in each state."""
    counts = np.bincount(states, minlength=len(STATES))
    text = Text()
    for state, count in zip(STATES, counts.tolist(), strict=True):
        if count or state.name in ("free", "used"):
            text.append(f"{state.glyph} ", style=state.style)
            text.append(f"{state.name} {count}   ")
    return text
