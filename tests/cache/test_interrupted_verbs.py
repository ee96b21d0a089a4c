"""Whatever goes wrong inside a verb, and wherever: the manager is left as it was before the call.

The tracer raises at the first line that a verb runs, in a fresh manager at the second, and so on to the last one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from cache_support import UNSEEN, computed, state_of, tiny

from pagedkv.cache import (
    Admitted,
    ContiguousManager,
    GrowingContiguousManager,
    KVCacheManager,
    Pinned,
    Retention,
    Sequence,
    check,
)
from pagedkv.cache import __file__ as package_file

HOUSE = str(Path(package_file).parent)
Verb = Callable[[KVCacheManager], object]


class Interruption(BaseException):
    """Not an Exception, as KeyboardInterrupt is none."""


def interrupted(verb: Verb, manager: Any, line: int) -> bool:
    """Run the verb and raise at its `line`-th line inside the allocator; False if it ended before."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(HOUSE):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Interruption
        return trace

    sys.settrace(trace)
    try:
        verb(manager)
    except Interruption:
        return True
    finally:
        sys.settrace(None)
    return False


def assert_undone(verb: Callable[[Any], object], manager: Any, state: Callable[[Any], object]) -> int:
    """Interrupt the verb at each of its lines in turn, until it runs through; returns how many that were."""
    before, line = state(manager), 1
    while interrupted(verb, manager, line):
        assert state(manager) == before, f"after an interruption at line {line}"
        line += 1
    return line


def crowded() -> KVCacheManager:
    """Two rows that share, one that decodes, a pin, a promise, cached pages, a pending prompt, and one free page."""
    manager = tiny(12, partial_reuse=True, max_rows=6)
    done = computed(manager, [9] * 9, namespace="gone").sequence
    old = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8, 1]).sequence
    manager.release([done, old])
    manager.events.start(5)
    manager.tick(1.0)
    for name in ("gone", "new"):
        manager.set_limits(name, floor=1, ceiling=6)
    a = computed(manager, [1, 2, 3, 4, 5, 6, 7], owner="a", retention=[Retention(0, 5, 60, ttl=3.0)]).sequence
    manager.fork(a.row, reserve=1)
    decoding = computed(manager, [3, 3, 3], namespace="other", reserve=2).sequence
    manager.extend([decoding.row], [3])
    manager.commit([decoding.row], 1)
    manager.pin([1, 2, 3, 4])
    manager.admit([7, 7, 7, 7, 7])
    check(manager)
    assert [row for row in range(6) if manager.table.live[row]] == [0, 1, 2, 3]
    return manager


def handle(manager: KVCacheManager, row: int) -> Sequence:
    return Sequence(row, int(manager.table.generation[row]))


VERBS: dict[str, Verb] = {
    "admit, evicting": lambda m: m.admit([8] * 16, namespace="new"),
    "admit, sharing and copying": lambda m: m.admit([1, 2, 3, 4, 5, 6, 9, 9], reserve=1),
    "admit, retained": lambda m: m.admit([2] * 6, retention=[Retention(priority=90)]),
    "admit, refused": lambda m: m.admit([5] * 44),
    "admit, pending": lambda m: m.admit([7] * 6, share_pending=True),
    "extend by one": lambda m: m.extend([2, 3], [4, 4]),
    "extend, copying": lambda m: m.extend([0, 1], [4, 5]),
    "extend by several": lambda m: m.extend([3, 1, 0], [6] * 9, [4, 2, 3]),
    "commit": lambda m: m.commit([3], [5]),
    "release": lambda m: m.release([handle(m, row) for row in (1, 3, 2)]),
    "fork": lambda m: m.fork(2, 2, reserve=1),
    "reorder": lambda m: m.reorder([0, 2, 3], [2, 0, 1]),
    "trim": lambda m: m.trim([0, 3], [3, 4]),
    "pin": lambda m: m.pin([9] * 4, "gone"),
    "hold": lambda m: m.hold(2),
    "unpin": lambda m: m.unpin(Pinned(0, 4)),
    "reset": lambda m: m.reset(),
    "reset of a namespace": lambda m: m.reset(namespace="gone"),
    "resize, smaller": lambda m: m.resize(7),
    "resize, larger": lambda m: m.resize(40),
    "tick": lambda m: m.tick(50.0),
    "set_limits": lambda m: m.set_limits("other", floor=1, ceiling=2),
    "set_limits, evicting": lambda m: m.set_limits("gone", ceiling=1),
    "set_limits, away": lambda m: m.set_limits("new"),
    "namespace_usage": lambda m: m.namespace_usage("gone"),
    "usage": lambda m: m.usage(),
}


@pytest.mark.parametrize("name", VERBS)
def test_an_interrupted_verb_has_changed_nothing(name: str) -> None:
    manager = crowded()
    assert assert_undone(VERBS[name], manager, state_of) > 3
    check(manager)
    undisturbed = crowded()
    VERBS[name](undisturbed)
    assert state_of(manager) == state_of(undisturbed), "the verb that ran at last did what it does undisturbed"


@pytest.mark.parametrize("kind", [ContiguousManager, GrowingContiguousManager])
def test_an_interrupted_verb_of_a_contiguous_manager_has_changed_nothing(kind: Any) -> None:
    manager = kind(12, 4, max_rows=3, max_seq_len=16)
    first, second = manager.admit([1] * 3), manager.admit([2] * 3)
    assert isinstance(first, Admitted)
    assert isinstance(second, Admitted)
    verbs: list[Callable[[Any], object]] = [
        lambda m: m.extend([1, 0], [5] * 8, [3, 5]),
        lambda m: m.commit([1], 2),
        lambda m: m.admit([3] * 5),
        lambda m: m.release([first.sequence]),
    ]
    for verb in verbs:
        assert_undone(verb, manager, state_of)


def test_the_state_that_is_compared_is_the_whole_state() -> None:
    """Every array of the manager and its parts is in it."""
    manager = crowded()
    parts = [manager, manager.pool, manager.pool.queue, manager.table, manager.index, manager.reservations]
    arrays = [(part, name) for part in parts for name, held in vars(part).items() if isinstance(held, np.ndarray)]
    assert len(arrays) > 15
    for part, name in arrays:
        if name in UNSEEN:
            continue
        before = state_of(manager)
        held = getattr(part, name)
        at = np.unravel_index(manager.table.table[0, 0] if part is manager.index else 0, held.shape)
        was = held[at]
        held[at] = not was if held.dtype == np.bool_ else was + 1
        assert state_of(manager) != before, name
        held[at] = was
