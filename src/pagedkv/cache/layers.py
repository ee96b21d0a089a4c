"""What a GroupedManager is given and answers: layer groups, places in each of them, and their usage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose keys and values live and die together.

    Attributes:
        name: what tables, slots and copies are found under.
        num_pages: usable pages of its pool.
        page_bytes: bytes of one page over the layers of the group.
        window: tokens that a query sees, itself included; None for all.
    """

    name: str
    num_pages: int
    page_bytes: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """The next tokens have their places in every group.

    Attributes:
        slots: int64 [tokens] per group, page * page_size + offset.
        copies: int32 [pairs, 2] per group, as in `Extended`.
    """

    slots: Mapping[str, NDArray[np.int64]]
    copies: Mapping[str, NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """Pages of one group, as in `Usage`; used_bytes is what the used ones take."""

    total: int
    used: int
    cached: int
    free: int
    promised: int
    used_bytes: int


def checked_groups(groups: Iterable[LayerGroup], step: int) -> dict[str, LayerGroup]:
    """The groups by name; raises ConfigError if they cannot be meant."""
    given = list(groups)
    named = {group.name: group for group in given}
    if not given or len(named) < len(given):
        raise ConfigError(f"layer groups {[group.name for group in given]}; need at least one, and different names")
    for group in given:
        sizes = {"num_pages": group.num_pages, "page_bytes": group.page_bytes, "window": group.window, "step": step}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} of group {group.name!r} is {value}; it must be at least 1")
    return named
