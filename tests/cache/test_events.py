"""The stream of events, the record of calls, and the snapshot of the state."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from cache_support import Follower, admitted, computed, pages, served, tiny

from pagedkv.cache import EventKind, KVCacheManager
from pagedkv.errors import ConfigError, InvalidRequestError


def kinds(manager: KVCacheManager, first: int = 0) -> list[tuple[str, int, int]]:
    batch = manager.events.read(first)
    names = [EventKind(kind).name for kind in batch.kind.tolist()]
    return list(zip(names, batch.page.tolist(), batch.other.tolist(), strict=True))


def test_no_event_is_kept_unless_asked_for() -> None:
    manager = tiny()
    served(manager, [1] * 5)
    assert not manager.events.on
    assert (manager.events.written, manager.events.read().kind.size) == (0, 0)


def test_the_life_of_a_page() -> None:
    manager = tiny(num_pages=2)
    manager.events.start(100)
    served(manager, [1] * 5)
    served(manager, [1] * 5)
    served(manager, [2] * 8)
    assert kinds(manager) == [
        ("ALLOCATED", 1, 1),
        ("ALLOCATED", 2, 1),
        ("INDEXED", 1, -1),
        ("RELEASED", 2, 0),
        ("RELEASED", 1, 0),
        ("SHARED", 1, 0),
        ("ALLOCATED", 2, 1),
        ("RELEASED", 2, 0),
        ("RELEASED", 1, 0),
        ("FORGOTTEN", 1, 0),
        ("EVICTED", 1, 0),
        ("ALLOCATED", 1, 1),
        ("ALLOCATED", 2, 1),
        ("INDEXED", 1, -1),
        ("INDEXED", 2, 1),
        ("RELEASED", 2, 0),
        ("RELEASED", 1, 0),
    ]


def test_copies_and_moves_are_events() -> None:
    manager = tiny(num_pages=8)
    row = computed(manager, [1] * 6).sequence
    (branch,) = manager.fork(row.row).sequences  # type: ignore[union-attr]
    manager.events.start(100)
    copies = manager.extend([branch.row], [2]).copies  # type: ignore[union-attr]
    assert ("COPIED", *copies[0].tolist()) in kinds(manager)
    seen = manager.events.written
    moved = manager.resize(3).copies
    manager.resize(2)
    assert kinds(manager, seen) == [("MOVED", *pair) for pair in moved.tolist()]


def test_a_full_ring_says_how_many_events_are_lost() -> None:
    manager = tiny(num_pages=8)
    manager.events.start(3)
    admitted(manager, [1] * 20)
    batch = manager.events.read()
    assert (batch.first, batch.lost, batch.page.tolist()) == (2, 2, [3, 4, 5])
    assert manager.events.read(5).kind.size == 0
    assert manager.events.read(99).kind.size == 0


def test_a_refusal_is_no_event() -> None:
    manager = tiny(num_pages=2)
    manager.events.start(10)
    manager.admit([1] * 40)
    with pytest.raises(InvalidRequestError):
        manager.admit([])
    assert manager.events.written == 0


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity of -1"):
        tiny().events.start(-1)


def test_a_reader_that_comes_in_time_knows_all() -> None:
    manager = tiny(num_pages=6, partial_reuse=True)
    reader = Follower(manager, capacity=24)
    for turn in range(30):
        served(manager, [turn % 3] * (1 + turn % 9))
        reader.agrees_with(manager)


def test_a_record_is_replayed_into_the_same_state() -> None:
    manager = tiny(num_pages=6, hasher=None)
    recording = manager.record()
    row = computed(manager, np.array([1] * 6, np.int32), namespace="a").sequence
    tokens = np.array([2, 3])
    manager.extend([row.row], tokens, 2)
    tokens[:] = 0  # what the caller does with his array later is not replayed
    with pytest.raises(InvalidRequestError):
        manager.trim([row.row], [100])
    manager.release(iter([row]))
    again = pickle.loads(pickle.dumps(recording)).replay()
    before, after = manager.snapshot(), again.snapshot()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert again.match([1] * 6, "a") == manager.match([1] * 6, "a") == 4


def test_a_namespace_that_is_known_by_identity_stays_itself_in_a_record() -> None:
    manager, salt = tiny(num_pages=6, hasher=None), object()
    recording = manager.record()
    row = computed(manager, [1] * 6, namespace=salt).sequence
    manager.release(sequences=(handle for handle in [row]))
    again = recording.replay()
    assert again.match([1] * 6, salt) == manager.match([1] * 6, salt) == 4


def test_only_a_fresh_manager_can_be_recorded() -> None:
    manager = tiny()
    admitted(manager, [1])
    with pytest.raises(InvalidRequestError, match="1 calls have been made"):
        manager.record()


def test_a_snapshot_is_a_copy_that_names_every_state() -> None:
    manager = tiny(num_pages=4)
    served(manager, [1] * 5)
    row = computed(manager, [2] * 5, owner="chat", namespace="b").sequence
    manager.pin([2] * 4, "b")
    arrays = manager.snapshot()
    assert arrays["page_state"].tolist().count(1) == 1
    assert [page for page, state in enumerate(arrays["page_state"].tolist()) if state == 2] == sorted(
        pages(manager, row)
    )
    assert arrays["row_owner"][row.row] == "chat"
    assert arrays["pin_pages"].tolist() == pages(manager, row)[:1]
    assert arrays["namespace_name"].tolist() == ["None", "'b'"]
    before = arrays["row_table"].copy()
    manager.release([row])
    assert np.array_equal(arrays["row_table"], before)
