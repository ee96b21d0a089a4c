"""The growing contiguous allocator, and what both contiguous ones lose to fragmentation."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cache_support import snapshot

from pagedkv.cache import (
    Admitted,
    ContiguousManager,
    Extended,
    Fragmentation,
    GrowingContiguousManager,
    Never,
    Sequence,
    Wait,
)


def tiny(num_pages: int = 8) -> GrowingContiguousManager:
    return GrowingContiguousManager(num_pages, 4, max_rows=4, max_seq_len=64)


def admitted(manager: GrowingContiguousManager | ContiguousManager, length: int, **options: int) -> Sequence:
    answer = manager.admit([1] * length, **options)
    assert isinstance(answer, Admitted), answer
    return answer.sequence


def pages(manager: GrowingContiguousManager, sequence: Sequence) -> list[int]:
    return manager.table.table[sequence.row, : manager.table.pages[sequence.row]].tolist()


def test_a_request_takes_what_it_has_now_and_grows_in_place() -> None:
    manager = tiny()
    a = admitted(manager, 5)
    answer = manager.extend([a.row], [1] * 4, 4)
    assert isinstance(answer, Extended)
    assert (pages(manager, a), answer.copies.shape) == ([1, 2, 3], (0, 2))


def test_a_request_that_cannot_grow_moves_and_says_what_to_copy() -> None:
    manager = tiny()
    a, b = admitted(manager, 8), admitted(manager, 4)
    answer = manager.extend([a.row], [1])
    assert isinstance(answer, Extended)
    assert (pages(manager, a), pages(manager, b)) == ([4, 5, 6], [3])
    assert answer.copies.tolist() == [[1, 4], [2, 5]]
    assert manager.moved_pages == 2
    assert manager.holes.stretches == [(1, 2), (7, 2)]


def test_a_request_that_finds_no_hole_waits_and_nobody_has_moved() -> None:
    manager = tiny(num_pages=6)
    a, b, c = admitted(manager, 4), admitted(manager, 4), admitted(manager, 12)
    before = snapshot(manager)
    assert manager.extend([c.row, a.row], [1, 1]) == Wait(2, 1)  # its own page counts as free
    assert snapshot(manager) == before
    manager.release([b])
    assert isinstance(manager.extend([a.row], [1]), Extended)


def test_a_request_alone_slides_within_its_own_room() -> None:
    """With its own stretch counted as free, a request that fits into the pool never waits alone."""
    manager = tiny(num_pages=4)
    a, b = admitted(manager, 4), admitted(manager, 8)
    manager.release([a])
    answer = manager.extend([b.row], [1] * 8, 8)
    assert isinstance(answer, Extended)
    assert (pages(manager, b), answer.copies.tolist()) == ([1, 2, 3, 4], [[2, 1], [3, 2]])


def test_pages_that_hold_no_token_yet_are_not_copied() -> None:
    manager = tiny()
    a, b = admitted(manager, 4, reserve=4), admitted(manager, 4)
    answer = manager.extend([a.row], [1] * 5, 5)
    assert isinstance(answer, Extended)
    assert (answer.copies.tolist(), manager.moved_pages) == ([[1, 4]], 1)
    assert pages(manager, b) == [3]


def test_larger_than_the_pool_is_never_and_not_now_is_wait() -> None:
    manager = tiny(num_pages=4)
    assert manager.admit([1] * 17) == Never(5, 4)
    a = admitted(manager, 4)
    assert manager.admit([1] * 16) == Wait(4, 3)
    assert manager.extend([a.row], [1] * 16, 16) == Never(5, 4)
    assert manager.admit([1] * 4, headroom=3) == Wait(4, 3)


def test_free_room_in_pieces_is_external_fragmentation() -> None:
    manager = tiny(num_pages=5)
    rows = [admitted(manager, 4) for _ in range(4)]
    manager.release([rows[0], rows[2]])
    assert manager.fragmentation() == Fragmentation(internal=0, reserved=0, external=8, largest_hole=1, holes=3)
    assert manager.admit([1] * 5) == Wait(2, 1)


@pytest.mark.parametrize("kind", [ContiguousManager, GrowingContiguousManager])
def test_room_behind_the_last_token_is_internal_or_reserved(
    kind: type[ContiguousManager] | type[GrowingContiguousManager],
) -> None:
    manager = kind(8, 4, max_rows=4, max_seq_len=16)
    admitted(manager, 5, reserve=11)
    assert manager.fragmentation() == Fragmentation(internal=3, reserved=8, external=0, largest_hole=4, holes=1)


@pytest.mark.parametrize("seed", range(8))
def test_every_row_reads_its_own_tokens_after_any_moves(seed: int) -> None:
    """A store of cells, written through slots and copied as told, against lists."""
    rng = random.Random(seed)
    manager = tiny(num_pages=rng.randint(4, 12))
    store = np.zeros((manager.num_pages + 1, 4), np.int64)
    held: dict[Sequence, list[int]] = {}
    for step in range(300):
        verb = rng.choice(["admit", "extend", "extend", "release"])
        if verb == "admit":
            tokens = [step * 100 + i for i in range(rng.randint(1, 9))]
            answer = manager.admit(tokens, reserve=rng.choice([0, 0, 5]))
            if isinstance(answer, Admitted):
                slots = manager.table.slots([answer.sequence.row], [0], [len(tokens)])
                store.reshape(-1)[slots] = tokens
                held[answer.sequence] = tokens
        elif verb == "extend" and held:
            chosen = [row for row in rng.sample(list(held), rng.randint(1, len(held))) if len(held[row]) < 50]
            counts = [rng.randint(0, 5) for _ in chosen]
            new = [step * 100 + i for i in range(sum(counts))]
            before = snapshot(manager)
            grown = manager.extend([row.row for row in chosen], new, counts)
            if not isinstance(grown, Extended):
                assert snapshot(manager) == before
                continue
            store[grown.copies[:, 1]] = store[grown.copies[:, 0]]  # all reads before all writes
            store.reshape(-1)[grown.slots] = new
            rest = iter(new)
            for row, count in zip(chosen, counts, strict=True):
                held[row] = held[row] + [next(rest) for _ in range(count)]
        elif held:
            gone = rng.choice(list(held))
            manager.release([gone])
            del held[gone]
        taken: list[int] = []
        for row, tokens in held.items():
            own = pages(manager, row)
            assert own == list(range(own[0], own[0] + len(own)))
            assert store[own].reshape(-1)[: len(tokens)].tolist() == tokens
            taken += own
        lost, usage = manager.fragmentation(), manager.usage()
        assert lost.internal + lost.reserved + usage.tokens == usage.used * 4
        assert lost.external + lost.largest_hole * 4 == usage.free * 4
        free = [page for first, count in manager.holes.stretches for page in range(first, first + count)]
        assert sorted(taken + free) == list(range(1, manager.num_pages + 1))
