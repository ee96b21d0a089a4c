"""ContiguousManager: one stretch of max_seq_len tokens per request, first fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedkv.cache import Admitted, ContiguousManager, Extended, Never, Sequence, Wait


def manager_of(num_pages: int = 8, max_seq_len: int = 12, max_rows: int = 4) -> ContiguousManager:
    """Pages of 4 tokens; with these sizes 3 pages a request, so 2 requests fit and 2 pages are left over."""
    return ContiguousManager(num_pages, 4, max_rows=max_rows, max_seq_len=max_seq_len)


def admit(manager: ContiguousManager, length: int = 5) -> Sequence:
    answer = manager.admit(range(length))
    assert isinstance(answer, Admitted)
    return answer.sequence


def test_a_request_gets_consecutive_pages_for_max_seq_len_however_short_it_is() -> None:
    manager = manager_of()
    row = admit(manager, 1).row
    assert manager.table.table[row].tolist() == [1, 2, 3]
    assert manager.usage().used == 3


def test_nothing_is_ever_cached() -> None:
    manager = manager_of()
    first = admit(manager)
    manager.commit(first.row, 5)
    assert manager.admit(range(5)) == Admitted(Sequence(1, 0), 0)
    manager.release([first])
    usage = manager.usage()
    assert (usage.used, usage.cached, usage.free, usage.saved, usage.promised) == (3, 0, 5, 0, 0)


def test_a_request_waits_for_a_stretch_even_if_the_pages_are_there_in_pieces() -> None:
    manager = manager_of(9)
    handles = [admit(manager) for _ in range(3)]
    manager.release([handles[1]])
    assert isinstance(manager.admit([1]), Admitted)
    assert manager.admit([1]) == Wait(needed=3, free=0)


def test_the_waiting_answer_says_how_long_the_longest_stretch_is() -> None:
    manager = manager_of()
    admit(manager)
    admit(manager)
    assert manager.admit([1]) == Wait(needed=3, free=2)


def test_a_stretch_longer_than_the_pool_never_fits() -> None:
    assert manager_of(2).admit([1]) == Never(needed=3, capacity=2)


def test_a_request_waits_for_a_row() -> None:
    manager = manager_of(max_rows=1)
    admit(manager)
    assert manager.admit([1]) == Wait(1, 0, on="rows")


def test_growing_within_the_reservation_never_waits_and_draws_nothing() -> None:
    manager = manager_of(3)
    row = admit(manager, 3).row
    answer = manager.extend(row, range(9), 9)
    assert isinstance(answer, Extended)
    assert answer.slots.tolist() == [7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert manager.usage().used == 3


def test_usage_shows_the_room_that_is_reserved_and_not_filled() -> None:
    manager = manager_of()
    admit(manager, 3)
    usage = manager.usage()
    assert (usage.tokens, usage.used, usage.waste) == (3, 3, 0.75)


def test_private_pages_are_the_whole_reservation() -> None:
    manager = manager_of()
    rows = [admit(manager).row, admit(manager).row]
    assert manager.private_pages(rows).tolist() == [3, 3]


def test_releasing_twice_is_releasing_once() -> None:
    manager = manager_of()
    handle = admit(manager)
    manager.release([handle, handle])
    manager.release([handle])
    assert manager.holes.stretches == [(1, 8)]


@given(
    st.integers(1, 20),
    st.integers(1, 3),
    st.lists(st.none() | st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=30),
)
def test_stretches_are_those_of_a_row_of_flags(num_pages: int, reserved: int, steps: list[list[int] | None]) -> None:
    """None admits, a list releases these of the live requests; the oracle scans a list of taken pages."""
    manager = ContiguousManager(num_pages, 1, max_rows=50, max_seq_len=reserved)
    taken, live = [False] * num_pages, dict[Sequence, int]()
    for step in steps:
        if step is None:
            fits = [at for at in range(num_pages - reserved + 1) if not any(taken[at : at + reserved])]
            answer = manager.admit([1])
            assert isinstance(answer, Admitted) == bool(fits)
            if isinstance(answer, Admitted):
                live[answer.sequence] = fits[0]
                taken[fits[0] : fits[0] + reserved] = [True] * reserved
                first = manager.table.table[answer.sequence.row].tolist()
                assert first == list(range(fits[0] + 1, fits[0] + 1 + reserved))
        elif live:
            handles = [list(live)[at % len(live)] for at in step]
            manager.release(handles)
            for handle in set(handles):
                at = live.pop(handle)
                taken[at : at + reserved] = [False] * reserved
        assert [page for first, pages in manager.holes.stretches for page in range(first - 1, first - 1 + pages)] == [
            page for page, is_taken in enumerate(taken) if not is_taken
        ]
        assert manager.usage().used == sum(taken)
