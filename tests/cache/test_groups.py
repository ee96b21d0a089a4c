"""Layers of several kinds under one manager: windows, their pools, and hits that every group can serve."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cache_support import NarrowHash, assert_named, state_of
from groups_support import Sequences, grouped
from hypothesis import given, settings
from hypothesis import strategies as st
from test_interrupted_verbs import assert_undone

from pagedkv.cache import ChainHash, Forked, GroupedManager, LayerGroup, Never, Placed, Wait, audit_groups
from pagedkv.errors import ConfigError, InvalidRequestError


def started(tokens: list[int], manager: GroupedManager | None = None, **options: Any) -> tuple[Sequences, int]:
    """A sequence whose prompt is computed."""
    run = Sequences(manager or grouped())
    row = run.admit(tokens, **options).sequence.row
    assert run.prefill(row) is None
    return run, row


def held(run: Sequences, row: int) -> list[int]:
    """The columns that the row holds in the window's table."""
    return [column for column, page in enumerate(run.manager.tables["window"][row].tolist()) if page]


@pytest.mark.parametrize(
    ("length", "columns"), [(8, [0, 1]), (11, [1, 2]), (12, [1, 2]), (14, [1, 2, 3]), (15, [2, 3])]
)
def test_what_falls_out_of_the_window_is_given_back(length: int, columns: list[int]) -> None:
    """FAILURES 80: page 0 is free when the next query is at 12, page 1 when it is at 15."""
    run, row = started([1] * length)
    assert held(run, row) == columns


def test_nothing_is_lost_when_the_length_equals_the_window() -> None:
    """FAILURES 84."""
    run, row = started([1, 2, 3, 4, 5, 6])
    for token in (7, 8, 9):
        run.extend([row], [token])
    assert held(run, row) == [0, 1, 2]


def test_a_window_smaller_than_a_page() -> None:
    """FAILURES 81."""
    run, row = started([1] * 16, grouped(window=2))
    for _ in range(4):
        run.extend([row], [2])
    assert held(run, row) == [4]
    run.release([row])
    usage = run.manager.usage()["window"]
    assert usage.used == 0
    assert usage.free + usage.cached == usage.total


def test_tables_never_name_a_page_of_somebody_else() -> None:
    """FAILURES 82: the row decodes past its window while another takes what it gave back."""
    run, row = started([1] * 12, grouped(windowed=7))
    other = run.admit([2] * 12).sequence.row
    assert run.prefill(other) is None
    for _ in range(12):
        run.extend([row, other], [3, 4])
        mine, theirs = (set(run.manager.tables["window"][at].tolist()) - {0} for at in (row, other))
        assert not mine & theirs


def test_a_prompt_far_longer_than_the_windows_pool_is_computed_step_by_step() -> None:
    """FAILURES 85: what admission sets aside suffices for a prompt of any length."""
    run, row = started(list(range(60)), grouped(windowed=4))
    assert run.manager.usage()["window"].used <= 4
    assert held(run, row) == [13, 14]


def test_a_prompt_waits_for_the_group_that_is_short() -> None:
    """FAILURES 5: a refusal has changed no group."""
    run, row = started([1] * 20, grouped(windowed=5))
    before = run.manager.usage()
    assert run.admit([2] * 20) == Wait(4, 3)
    assert run.manager.usage() == before
    run.release([row])
    assert run.admit([2] * 20).cached_tokens == 0


def test_a_window_that_can_never_hold_a_step_is_never() -> None:
    run = Sequences(grouped(windowed=3))
    assert run.admit([2] * 20) == Never(4, 3)
    assert run.admit([2] * 12).sequence.row == 0


def test_rows_with_a_reservation_never_wait_for_the_window() -> None:
    run = Sequences(grouped(full=64, windowed=12, max_rows=3))
    rows = [run.admit([token] * 5, reserve=50).sequence.row for token in (1, 2, 3)]
    for row in rows:
        assert run.prefill(row) is None
    for step in range(50):
        assert isinstance(run.extend(rows, [step] * 3), Placed)


def test_a_hit_counts_only_as_far_as_every_group_serves_it() -> None:
    """FAILURES 86: a conversation of 24 has given back its first pages; a prompt that shares 10 tokens starts anew."""
    run, row = started(list(range(24)), grouped(windowed=6))
    run.release([row])
    other = run.admit([50] * 16).sequence.row  # evicts the window's oldest cached pages
    assert run.prefill(other) is None
    assert run.manager.match([*range(10), 99]) == 0
    assert run.manager.match([*range(24), 99]) == 24, "what the next query at 24 sees is still there"


def test_a_conversation_that_goes_on_hits_all_of_it() -> None:
    """FAILURES 86: appending at 24 reuses, though pages before the window are gone."""
    run, row = started(list(range(24)), grouped(windowed=16))
    run.release([row])
    answer = run.admit([*range(24), 99])
    assert answer.cached_tokens == 24
    assert run.prefill(answer.sequence.row) is None


def test_what_was_computed_again_serves_again() -> None:
    """The window lost the prefix but full attention kept it: after one computation of it, hits are whole again."""
    run, row = started(list(range(12)), grouped(windowed=4))
    run.release([row])
    other = run.admit([50] * 12).sequence.row
    assert run.prefill(other) is None
    run.release([other])
    assert run.manager.match([*range(12), 99]) == 0
    again = run.admit([*range(12), 99])
    assert run.prefill(again.sequence.row) is None
    run.release([again.sequence.row])
    assert run.manager.match([*range(12), 99]) == 12


def test_a_finished_row_frees_each_page_once() -> None:
    """FAILURES 88."""
    run, row = started([1] * 20)
    run.release([row])
    run.manager.reset()
    usage = run.manager.usage()
    assert all(part.free == part.total for part in usage.values())
    assert audit_groups(run.manager) == []


def test_a_fork_has_null_for_what_left_the_window() -> None:
    """FAILURES 93."""
    run, row = started([1] * 20)
    other = run.admit([2] * 8).sequence.row
    assert run.prefill(other) is None
    (branch,) = run.manager.fork(row).sequences  # type: ignore[union-attr]
    run.tokens[branch.row], run.handles[branch.row] = list(run.tokens[row]), branch
    run.check()
    assert held(run, branch.row) == held(run, row) == [3, 4]
    run.extend([row, branch.row], [5, 6])
    run.release([row])
    run.extend([branch.row], [7])


def test_branches_copy_the_shared_last_page_in_every_group() -> None:
    """FAILURES 28, 91."""
    run, row = started([1] * 6)
    (branch,) = run.manager.fork(row).sequences  # type: ignore[union-attr]
    run.tokens[branch.row], run.handles[branch.row] = list(run.tokens[row]), branch
    answer = run.extend([row, branch.row], [5, 6])
    assert {name: len(pairs) for name, pairs in answer.copies.items()} == {"full": 1, "window": 1}


def test_trim_goes_back_only_within_the_window() -> None:
    run, row = started([1] * 20)
    with pytest.raises(InvalidRequestError, match="row 0 cannot go back to 12 tokens"):
        run.manager.trim([row], [12])
    run.manager.trim([row], [19])
    run.tokens[row] = run.tokens[row][:19]
    run.check()
    run.extend([row], [3])


def test_layers_without_full_attention() -> None:
    run, row = started(list(range(30)), grouped(full=None, windowed=6))
    assert list(run.manager.tables) == ["window"]
    run.release([row])
    assert run.manager.match([*range(30), 1]) == 28


def test_usage_is_told_per_group_in_pages_and_bytes() -> None:
    """FAILURES 63, 72: a plan of pages_for_tokens(window + step) per row is what a row holds at most."""
    run = Sequences(grouped())
    row = run.admit([1] * 40).sequence.row
    most = 0
    while run.manager.leader.table.computed[row] < 40:
        run.compute([row], [4])
        most = max(most, run.manager.usage()["window"].used)
    usage = run.manager.usage()
    assert most <= run.manager.windowed["window"].most == 4
    assert (usage["full"].used, usage["full"].used_bytes) == (10, 10 * 256)
    assert usage["window"].used_bytes == usage["window"].used * 64


def test_announced_concurrency_is_what_is_admitted() -> None:
    """FAILURES 63: groups of different needs; admit the longest requests until refusal."""
    manager = grouped(full=64, windowed=13, max_rows=10)
    announced = min(64 // 10, 13 // manager.windowed["window"].most)
    admitted = 0
    while not isinstance(manager.admit([admitted] * 20, reserve=20), Wait):
        admitted += 1
    assert admitted == announced == 3


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], r"layer groups \[\]"),
        ([LayerGroup("a", 1, 1), LayerGroup("a", 2, 2)], "different names"),
        ([LayerGroup("a", 0, 1)], "num_pages of group 'a' is 0"),
        ([LayerGroup("a", 1, 1, 0)], "window of group 'a' is 0"),
    ],
)
def test_groups_that_cannot_be_meant_are_refused(groups: list[LayerGroup], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupedManager(groups, 4, max_rows=1, max_seq_len=16, step=4)


def test_tokens_without_a_place_cannot_be_committed() -> None:
    manager = grouped()
    row = manager.admit([1] * 8).sequence.row  # type: ignore[union-attr]
    with pytest.raises(InvalidRequestError, match="have no place in group 'window'"):
        manager.commit([row], [4])
    with pytest.raises(InvalidRequestError, match="5 tokens of row 0 at once; it has 8 left, step 4"):
        manager.place([row], [5])
    with pytest.raises(InvalidRequestError, match="once all theirs are committed"):
        manager.extend([row], [1])


def walk(rng: random.Random, steps: int, hasher: ChainHash) -> None:
    """Every verb in random order; `Sequences` reads every row after each."""
    manager = grouped(
        rng.choice([None, rng.randint(6, 24)]),
        rng.randint(4, 14),
        rng.randint(1, 12),
        step=rng.randint(1, 6),
        max_seq_len=40,
        hasher=hasher,
    )
    run, seen = Sequences(manager), [[1]]
    for _ in range(steps):
        table = manager.leader.table
        verb = rng.choice(["admit", "admit", "compute", "compute", "compute", "extend", "extend", "release", "branch"])
        rows = rng.sample(sorted(run.tokens), rng.randint(0, len(run.tokens)))
        done = [row for row in rows if table.computed[row] == table.length[row] and table.length[row] < 40]
        if verb == "admit":
            prompt = rng.choice(seen)[: rng.randint(0, 30)] + [rng.randint(1, 2) for _ in range(rng.randint(1, 6))]
            options = {"namespace": rng.choice([None, None, "b"]), "reserve": rng.choice([0, 0, 5])}
            if len(prompt) + options["reserve"] <= 40:
                run.admit(prompt, **options)
        elif verb == "compute":
            left = [int(table.length[row] - table.computed[row]) for row in rows]
            run.compute(rows, [min(rng.randint(0, manager.step), most) for most in left])
        elif verb == "extend" and done:
            run.extend(done, [rng.randint(1, 2) for _ in done])
            seen.extend(list(run.tokens[row]) for row in done)
        elif verb == "release" and rows:
            run.release(rows[:2])
        elif verb == "branch" and done:
            branch(run, rng, done)
        if rng.random() < 0.02:
            manager.reset()
            run.check()
    run.release(sorted(run.tokens))
    assert all(part.used == part.promised == 0 for part in manager.usage().values())


def branch(run: Sequences, rng: random.Random, rows: list[int]) -> None:
    """Fork, reorder or trim rows that are computed to their end."""
    manager = run.manager
    verb = rng.choice(["fork", "reorder", "trim"])
    if verb == "fork":
        answer = manager.fork(rows[0], rng.randint(1, 2))
        for sequence in answer.sequences if isinstance(answer, Forked) else ():
            run.tokens[sequence.row], run.handles[sequence.row] = list(run.tokens[rows[0]]), sequence
    elif verb == "reorder":
        parents = [rng.choice(rows) for _ in rows]
        manager.reorder(rows, parents)
        tokens = [list(run.tokens[parent]) for parent in parents]
        run.tokens.update(zip(rows, tokens, strict=True))
    else:
        row, length = rows[0], rng.randint(1, len(run.tokens[rows[0]]))
        try:
            manager.trim([row], [length])
            run.tokens[row] = run.tokens[row][:length]
        except InvalidRequestError:
            pass
    run.check()


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_random_interleavings(rng: random.Random, steps: int) -> None:
    """The choices are hypothesis's, so that a failure shrinks to a short program."""
    walk(rng, steps, ChainHash(seed=1))


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_random_interleavings_with_keys_that_collide(rng: random.Random, steps: int) -> None:
    walk(rng, steps, NarrowHash(bits=2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(200))
def test_long_random_interleavings(seed: int) -> None:
    walk(random.Random(seed), 600, ChainHash(seed=1))


VERBS: dict[str, Any] = {
    "admit": lambda m: m.admit([1] * 9),
    "admit, evicting": lambda m: m.admit([7] * 20),
    "place": lambda m: m.place([1], [4]),
    "extend": lambda m: m.extend([0, 2], [5, 6]),
    "commit": lambda m: m.commit([3], [4]),
    "release": lambda m: m.release([(0, int(m.leader.table.generation[0]))]),
    "fork": lambda m: m.fork(0),
    "reorder": lambda m: m.reorder([0], [2]),
    "trim": lambda m: m.trim([0], [13]),
    "reset": lambda m: m.reset(),
}


def group_state(manager: GroupedManager) -> Any:
    parts = {name: state_of(group) for name, group in manager.windowed.items()}
    return [state_of(manager.leader), parts, manager._read]


def busy() -> GroupedManager:
    run, row = started([1] * 14, grouped(full=14, windowed=14, max_rows=5))
    run.admit([2] * 8)
    (forked,) = run.manager.fork(row).sequences  # type: ignore[union-attr]
    assert (row, forked.row) == (0, 2)
    last = run.admit([4] * 4).sequence.row
    run.manager.place([last], [4])
    return run.manager


@pytest.mark.parametrize("name", VERBS)
def test_an_interrupted_verb_has_changed_no_group(name: str) -> None:
    assert assert_undone(VERBS[name], busy(), group_state) > 3


def count_too_high(manager: GroupedManager) -> str:
    manager.windowed["window"].pool.refcount[1] += 1
    return "owners, rows hold"


def page_lost(manager: GroupedManager) -> str:
    group = manager.windowed["window"]
    group.table[0, int(group.front[0])] = 0
    return "row 0 holds"


def window_cut(manager: GroupedManager) -> str:
    manager.windowed["window"].front[0] += 1
    return "row 0 has lost column 1, which its next query sees"


def unknown_page(manager: GroupedManager) -> str:
    group = manager.windowed["window"]
    group.page_of[int(group.table[0, 2])] = 13
    return "stands for 13, which knows page 0"


def promise_uncovered(manager: GroupedManager) -> str:
    manager.windowed["window"].reservations.promised += 1
    return "promised, rows have"


@pytest.mark.parametrize("breakage", [count_too_high, page_lost, window_cut, unknown_page, promise_uncovered])
def test_the_auditor_names_what_is_broken(breakage: Any) -> None:
    manager = busy()
    assert audit_groups(manager) == []
    sentence = breakage(manager)
    assert_named(audit_groups(manager), sentence)
