"""reset, pin and unpin: what leaves the cache on demand, what stays in it, and that nothing forgotten is ever hit."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable

import numpy as np
import pytest
from cache_support import admitted, computed, pages, resident, served, snapshot, split, tiny

from pagedkv.cache import Admitted, KVCacheManager, Pinned, ResetResult, Sequence, Wait, audit, check
from pagedkv.errors import InvalidRequestError, StaleSequenceError

EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]


def pinned(manager: KVCacheManager, tokens: list[int], namespace: Hashable = None) -> Pinned:
    """Pin a prefix that can be pinned."""
    answer = manager.pin(tokens, namespace)
    assert isinstance(answer, Pinned), answer
    check(manager)
    return answer


def reset(manager: KVCacheManager, **scope: Hashable) -> ResetResult:
    """Reset and audit."""
    answer = manager.reset(**scope)
    check(manager)
    return answer


def test_after_a_reset_the_same_prompt_hits_nothing() -> None:
    """FAILURES 25: the weights have changed in place."""
    manager = tiny()
    served(manager, [*EIGHT, 9])
    assert manager.match([*EIGHT, 9]) == 8
    assert reset(manager) == ResetResult(dropped=2, held=0)
    assert split(manager) == (0, 0, 4)
    assert len(manager.namespaces) == 0
    assert served(manager, [*EIGHT, 9]) == 0
    assert served(manager, [*EIGHT, 9]) == 8


def test_a_reset_under_a_live_row_reports_its_pages_and_nobody_hits_them() -> None:
    """FAILURES 25: reset while a request runs."""
    manager = tiny(8)
    row = computed(manager, [*EIGHT, 9]).sequence
    held = pages(manager, row)
    assert reset(manager) == ResetResult(dropped=0, held=2)
    assert pages(manager, row) == held
    assert manager.match([*EIGHT, 9]) == 0
    manager.release([row])
    check(manager)
    assert split(manager) == (0, 0, 8)


def test_what_a_row_computes_after_a_reset_is_not_indexed() -> None:
    """FAILURES 25: its new pages attend to keys and values from before, even if none of them was full yet."""
    manager = tiny(8)
    row = computed(manager, [1, 2, 3]).sequence.row
    reset(manager)
    manager.extend([row], [4, 5, 6, 7, 8, 9], [6])
    manager.commit([row], [6])
    check(manager)
    assert manager.match([*EIGHT, 9]) == 0
    assert resident(manager) == {}


def test_a_row_with_old_content_cannot_take_over_the_new_content_of_another() -> None:
    manager = tiny(8)
    old = computed(manager, [*EIGHT, 9]).sequence
    reset(manager)
    new = computed(manager, [*EIGHT, 9]).sequence
    assert set(pages(manager, old)).isdisjoint(pages(manager, new))
    manager.release([old])
    check(manager)
    shared = admitted(manager, [*EIGHT, 9])
    assert shared.cached_tokens == 8
    assert pages(manager, shared.sequence)[:2] == pages(manager, new)[:2]


def test_nobody_waits_for_a_prefix_whose_row_was_reset() -> None:
    manager = tiny(8)
    admitted(manager, [*EIGHT, 9])
    assert manager.admit([*EIGHT, 9], share_pending=True) == Wait(1, 0, on="prefix")
    reset(manager)
    assert isinstance(manager.admit([*EIGHT, 9], share_pending=True), Admitted)
    check(manager)


@pytest.mark.parametrize("gone", ["a", None])
def test_a_reset_of_one_namespace_leaves_the_others(gone: Hashable) -> None:
    manager = tiny(8)
    names: list[Hashable] = ["a", None, "b"]
    for name in names:
        served(manager, [*EIGHT, 9], namespace=name)
    assert reset(manager, namespace=gone) == ResetResult(dropped=2, held=0)
    assert [manager.match([*EIGHT, 9], name) for name in names] == [0 if name == gone else 8 for name in names]


def test_rows_of_other_namespaces_go_on_indexing_after_a_reset() -> None:
    manager = tiny(8)
    row = computed(manager, [1, 2, 3], namespace="b").sequence.row
    reset(manager, namespace="a")
    manager.extend([row], [4])
    manager.commit([row], [1])
    check(manager)
    assert manager.match(EIGHT, "b") == 4


def test_a_reset_of_an_unknown_or_unhashable_namespace() -> None:
    manager = tiny()
    served(manager, EIGHT)
    before = snapshot(manager)
    assert reset(manager, namespace="nobody") == ResetResult(0, 0)
    with pytest.raises(InvalidRequestError, match="list cannot be hashed"):
        manager.reset(namespace=[])  # type: ignore[arg-type]
    assert snapshot(manager) == before


def test_recycled_pages_of_a_reset_are_not_found_under_their_old_tokens() -> None:
    """FAILURES 27: no entry outlives the page, and none is left in the eviction queue."""
    manager = tiny(2)
    served(manager, EIGHT)
    reset(manager)
    for start in (20, 30, 40):
        assert served(manager, range(start, start + 8)) == 0
    assert served(manager, [1, 2, 3, 4, 9]) == 0
    assert split(manager)[1] <= 2


def test_promises_stay_covered_by_the_pages_a_reset_frees() -> None:
    manager = tiny()
    served(manager, EIGHT)
    row = admitted(manager, [20], reserve=15).sequence.row
    assert manager.usage().promised == 3
    reset(manager)
    manager.extend([row], range(21, 36), [15])
    check(manager)


def test_a_pinned_prefix_survives_pressure_up_to_its_last_page() -> None:
    """FAILURES 13: the page that was matched itself stays, not only those before it."""
    manager = tiny()
    served(manager, EIGHT)
    pin = pinned(manager, EIGHT)
    assert pin.tokens == 8
    assert (split(manager), manager.pins.held) == ((2, 0, 2), 2)
    served(manager, range(20, 28))
    served(manager, range(30, 38))
    assert manager.match([*EIGHT, 9]) == 8
    assert manager.admit(range(12)) == Wait(3, 2)
    manager.unpin(pin)
    check(manager)
    assert split(manager) == (0, 4, 0)
    assert isinstance(manager.admit(range(50, 66)), Admitted)
    assert manager.match([*EIGHT, 9]) == 0


def test_less_than_a_page_pins_nothing() -> None:
    """FAILURES 57."""
    manager = tiny()
    served(manager, EIGHT)
    pin = pinned(manager, [1, 2, 3])
    assert (pin.tokens, manager.pins.held) == (0, 0)
    manager.unpin(pin)
    check(manager)
    assert pinned(manager, [1, 2, 3, 4, 5]).tokens == 4


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pins_of_forked_prefixes_count_shared_pages_once(order: tuple[int, int]) -> None:
    """FAILURES 62: used + cached + free = total after every call."""
    manager = tiny(8)
    fork = [1, 2, 3, 4, 9, 9, 9, 9]
    served(manager, EIGHT)
    served(manager, fork)
    pins = [pinned(manager, EIGHT), pinned(manager, fork)]
    assert (split(manager), manager.pins.held) == ((3, 0, 5), 3)
    manager.unpin(pins[order[0]])
    check(manager)
    assert (split(manager), manager.pins.held) == ((2, 1, 5), 2)
    manager.unpin(pins[order[1]])
    check(manager)
    assert (split(manager), manager.pins.held) == ((0, 3, 5), 0)


def test_usage_counts_pages_that_only_a_pin_holds_as_full_and_not_as_saved() -> None:
    manager = tiny(8)
    served(manager, EIGHT)
    pinned(manager, EIGHT)
    usage = manager.usage()
    assert (usage.used, usage.tokens, usage.saved, usage.waste) == (2, 8, 0, 0.0)
    computed(manager, [*EIGHT, 9])
    computed(manager, [*EIGHT, 10])
    usage = manager.usage()
    assert (usage.used, usage.tokens, usage.saved) == (4, 10, 2)


def test_a_pin_that_would_uncover_promises_waits() -> None:
    manager = tiny()
    served(manager, EIGHT)
    row = admitted(manager, [20], reserve=7).sequence.row  # 1 page, 1 promised; 2 cached, 1 free
    assert isinstance(manager.pin(EIGHT), Pinned)
    check(manager)
    manager.extend([row], range(21, 28), [7])
    crowded = tiny()
    served(crowded, EIGHT)
    admitted(crowded, [20], reserve=11)
    before = snapshot(crowded)
    assert crowded.pin(EIGHT) == Wait(2, 1)
    assert snapshot(crowded) == before


def test_unpin_again_does_nothing_and_a_foreign_handle_is_an_error() -> None:
    manager = tiny()
    served(manager, EIGHT)
    first, second = pinned(manager, EIGHT), pinned(manager, EIGHT)
    manager.unpin(first)
    manager.unpin(first)
    check(manager)
    assert split(manager) == (2, 0, 2)
    with pytest.raises(StaleSequenceError, match="no pin 7 was ever handed out; 2 have been"):
        manager.unpin(Pinned(7, 8))
    manager.unpin(second)
    assert split(manager) == (0, 2, 2)


def test_a_reset_breaks_pins_openly() -> None:
    """FAILURES 25: what is pinned is not served either; its pages come back with unpin."""
    manager = tiny()
    served(manager, EIGHT)
    pin = pinned(manager, EIGHT)
    assert reset(manager) == ResetResult(dropped=0, held=2)
    assert manager.match([*EIGHT, 9]) == 0
    assert split(manager) == (2, 0, 2)
    manager.unpin(pin)
    check(manager)
    assert split(manager) == (0, 0, 4)


def pin_of_a_missing_page(manager: KVCacheManager) -> str:
    manager.pins._pages[0][0] = 99
    return "pin 0 holds pages that do not exist: [99,"


def pin_half_forgotten(manager: KVCacheManager) -> str:
    manager.index.indexed[manager.pins._pages[0][0]] = False
    return "pin 0 holds pages ["


def pin_out_of_order(manager: KVCacheManager) -> str:
    manager.pins._pages[0] = manager.pins._pages[0][::-1]
    return "that is no chain from a root"


def pinned_page_not_counted(manager: KVCacheManager) -> str:
    page = manager.pins._pages[0][0]
    manager.pool.refcount[page] = 2
    return f"page {page} counts 2 owners but is named by pin 0"


@pytest.mark.parametrize(
    "breakage", [pin_of_a_missing_page, pin_half_forgotten, pin_out_of_order, pinned_page_not_counted]
)
def test_the_auditor_names_broken_pins(breakage: Callable[[KVCacheManager], str]) -> None:
    manager = tiny()
    served(manager, EIGHT)
    pinned(manager, EIGHT)
    sentence = breakage(manager)
    found = audit(manager)
    assert any(sentence in violation for violation in found), found


class Walk:
    """Random verbs on one manager; `fresh` is every (namespace, prefix) computed whole since its last reset."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.manager = tiny(10, max_seq_len=24)
        self.rows: dict[Sequence, tuple[Hashable, list[int], bool]] = {}  # namespace, tokens, from before a reset
        self.pins: list[Pinned] = []
        self.fresh: set[tuple[Hashable, tuple[int, ...]]] = set()
        self.hits = 0

    def prompt(self) -> tuple[list[int], Hashable]:
        tokens = [self.random.randrange(2) for _ in range(self.random.randint(1, 4))]
        return [token for token in tokens for _ in range(4)][: self.random.randint(1, 16)], self.random.choice("ab")

    def known(self, name: Hashable, prefix: list[int]) -> bool:
        return not prefix or (name, tuple(prefix)) in self.fresh

    def admit(self) -> None:
        tokens, name = self.prompt()
        answer = self.manager.admit(tokens, namespace=name, reserve=self.random.choice([0, 0, 6]))
        if isinstance(answer, Admitted):
            assert self.known(name, tokens[: answer.cached_tokens])
            self.hits += answer.cached_tokens > 0
            self.rows[answer.sequence] = (name, tokens, False)

    def commit(self) -> None:
        if not self.rows:
            return
        sequence = self.random.choice(list(self.rows))
        name, tokens, old = self.rows[sequence]
        start = int(self.manager.table.computed[sequence.row])
        count = self.random.choice([len(tokens) - start, self.random.randint(0, len(tokens) - start)])
        self.manager.commit([sequence.row], [count])
        if not old:
            self.fresh |= {(name, tuple(tokens[:end])) for end in range(4, start + count + 1, 4)}

    def release(self) -> None:
        if self.rows:
            sequence = self.random.choice(list(self.rows))
            del self.rows[sequence]
            self.manager.release([sequence])

    def reset(self) -> None:
        name = self.random.choice(["a", "b", None])
        before = self.manager.usage()
        answer = self.manager.reset() if name is None else self.manager.reset(namespace=name)
        assert self.manager.usage().free == before.free + answer.dropped
        gone = {"a", "b"} if name is None else {name}
        self.fresh = {entry for entry in self.fresh if entry[0] not in gone}
        for sequence, (owner, tokens, old) in self.rows.items():
            self.rows[sequence] = (owner, tokens, old or owner in gone)

    def pin(self) -> None:
        tokens, name = self.prompt()
        answer = self.manager.pin(tokens, name)
        if isinstance(answer, Pinned) and len(self.pins) < 3:
            assert self.known(name, tokens[: answer.tokens])
            self.pins.append(answer)
        elif isinstance(answer, Pinned):
            self.manager.unpin(answer)

    def unpin(self) -> None:
        if self.pins:
            self.manager.unpin(self.pins.pop(self.random.randrange(len(self.pins))))

    def step(self) -> None:
        verbs = [self.admit, self.commit, self.release, self.reset, self.pin, self.unpin]
        self.random.choices(verbs, [16, 16, 12, 1, 4, 4])[0]()
        check(self.manager)
        split(self.manager)
        assert 0.0 <= self.manager.usage().waste <= 1.0
        assert self.manager.usage().saved >= 0


@pytest.mark.parametrize("seed", range(6))
def test_a_random_walk_never_hits_what_was_not_computed_since_the_last_reset(seed: int) -> None:
    """FAILURES 25 and 62, after every step."""
    walk = Walk(seed)
    for _ in range(400):
        walk.step()
    assert walk.hits > 5
    walk.manager.release(list(walk.rows))
    for pin in walk.pins:
        walk.manager.unpin(pin)
    walk.manager.reset()
    check(walk.manager)
    assert split(walk.manager) == (0, 0, 10)
    assert not np.any(walk.manager.pool.refcount)
