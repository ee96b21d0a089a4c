"""KVCacheManager under random interleavings, against cache_model.Model, with an audit after every step."""

from __future__ import annotations

import os
import random
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from cache_model import Model, Row
from cache_support import Follower, NarrowHash, held_tokens, resident, snapshot
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv.cache import (
    EVERY_NAMESPACE,
    Admitted,
    ChainHash,
    Extended,
    Forked,
    KVCacheManager,
    Pinned,
    ResetResult,
    Resized,
    Retention,
    Sequence,
    audit,
)
from pagedkv.errors import ConfigError, InvalidRequestError, StaleSequenceError

MAX_ROWS, MAX_SEQ_LEN = 5, 20
NAMESPACES: list[Hashable] = [None, "salt", ("adapter", 1)]
QUICK = settings(max_examples=60, stateful_step_count=40, deadline=None)
EXAMPLES = int(os.environ.get("EXAMPLES", "3000"))  # of the long run: hours, if wanted
LONG = settings(
    max_examples=EXAMPLES, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

token_lists = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=9)
picks = st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=MAX_ROWS)
counts = st.lists(st.integers(0, 6), min_size=MAX_ROWS, max_size=MAX_ROWS)
retentions = st.lists(
    st.builds(
        lambda start, size, priority, ttl: Retention(start, start + size if size else None, priority, ttl),
        st.integers(0, 9),
        st.integers(0, 9),
        st.sampled_from([0, 10, 35, 60, 100]),
        st.none() | st.integers(1, 9),
    ),
    min_size=1,
    max_size=2,
).map(tuple)


class Machine(RuleBasedStateMachine):
    """Drives the manager; what the model predicts is compared by ExactMachine."""

    hasher: ChainHash

    @initialize(num_pages=st.integers(3, 16), page_size=st.integers(1, 4))
    def start(self, num_pages: int, page_size: int) -> None:
        self.build(num_pages, page_size, caching=True)

    def build(self, num_pages: int, page_size: int, caching: bool, partial: bool = True) -> None:
        self.manager = KVCacheManager(
            num_pages,
            page_size,
            max_rows=MAX_ROWS,
            max_seq_len=MAX_SEQ_LEN,
            prefix_caching=caching,
            partial_reuse=partial,
            hasher=self.hasher,
        )
        self.store = np.zeros((num_pages + 1, page_size), np.int64)  # what the pages' keys and values would be
        self.recording = self.manager.record()
        self.follower = Follower(self.manager)
        self.watched = True
        self.now = 0
        self.live: dict[int, Sequence] = {}
        self.tokens: dict[int, list[int]] = {}
        self.names: dict[int, Hashable] = {}
        self.handles: list[Sequence] = []
        self.pinned: list[Pinned] = []
        self.seen: list[list[int]] = []
        self.ever_computed: set[tuple[Hashable, tuple[int, ...]]] = set()

    def more_settings(self, rng: random.Random) -> dict[str, int]:
        """What `start` takes beyond the sizes, for a walk."""
        return {}

    # What the exact machine overrides: called with what the manager answered.
    def on_admit(self, answer: Any, prompt: list[int], options: dict[str, Any]) -> None: ...
    def on_extend(self, answer: Any, rows: list[int], new: list[list[int]]) -> None: ...
    def on_commit(self, rows: list[int], count: list[int]) -> None: ...
    def on_release(self, rows: list[int]) -> None: ...
    def on_fork(self, answer: Any, row: int, branches: int, reserve: int) -> None: ...
    def on_reorder(self, rows: list[int], parents: list[int]) -> None: ...
    def on_trim(self, rows: list[int], lengths: list[int]) -> None: ...
    def on_reset(self, answer: ResetResult, names: list[Hashable]) -> None: ...
    def on_pin(self, answer: Any, tokens: list[int], name: Hashable) -> None: ...
    def on_hold(self, answer: Any, row: int) -> None: ...
    def on_unpin(self, handle: Pinned) -> None: ...
    def on_tick(self, demoted: int, now: float) -> None: ...
    def on_limits(self, name: Hashable, floor: int, ceiling: int | None) -> None: ...
    def on_resize(self, answer: Resized, wanted: int) -> None: ...

    @rule(
        fresh=token_lists,
        earlier=st.none() | st.integers(0, 40),
        keep=st.integers(0, MAX_SEQ_LEN),
        namespace=st.sampled_from(NAMESPACES),
        reserve=st.just(0) | st.integers(0, 8),
        headroom=st.just(0) | st.integers(0, 2),
        share_pending=st.booleans(),
        reuse=st.sampled_from([True, True, False]),
        retention=st.just(()) | retentions,
    )
    def admit(self, fresh: list[int], earlier: int | None, keep: int, **options: Any) -> None:
        prompt = fresh
        if earlier is not None and self.seen:
            prompt = self.seen[earlier % len(self.seen)][:keep] + fresh[: 1 + keep % 3]
        before = snapshot(self.manager)
        if len(prompt) + options["reserve"] > MAX_SEQ_LEN:
            with pytest.raises(InvalidRequestError, match=f"max_seq_len {MAX_SEQ_LEN}"):
                self.manager.admit(prompt, **options)
            assert snapshot(self.manager) == before
            return
        answer = self.manager.admit(prompt, owner=f"request {len(self.handles)}", **options)
        self.on_admit(answer, prompt, options)
        if not isinstance(answer, Admitted):
            assert snapshot(self.manager) == before
            return
        row = answer.sequence.row
        assert answer.cached_tokens < len(prompt)
        for end in range(self.manager.page_size, answer.cached_tokens + 1, self.manager.page_size):
            assert (options["namespace"], tuple(prompt[:end])) in self.ever_computed
        self.live[row], self.tokens[row], self.names[row] = answer.sequence, list(prompt), options["namespace"]
        self.handles.append(answer.sequence)
        self.seen.append(list(prompt))
        source, target = answer.copies.T
        self.store[target] = self.store[source]
        new = range(answer.cached_tokens, len(prompt))
        slots = self.manager.table.slots([row], [answer.cached_tokens], [len(new)])
        self.store.reshape(-1)[slots] = prompt[answer.cached_tokens :]

    @precondition(lambda self: self.live)
    @rule(pick=picks, count=counts, new=st.integers(0, 2**30), form=st.sampled_from(["default", "one number", "array"]))
    def extend(self, pick: list[int], count: list[int], new: int, form: str) -> None:
        rows = [row for row in dict.fromkeys(pick) if row in self.live]
        more = {"default": [1] * len(rows), "one number": [count[0]] * len(rows), "array": count[: len(rows)]}[form]
        added = [[1 + (new >> (3 * at + i)) % 2 for i in range(n)] for at, n in enumerate(more)]
        flat = [token for row in added for token in row]
        given: dict[str, Any] = {"default": {}, "one number": {"counts": count[0]}, "array": {"counts": more}}[form]
        before = snapshot(self.manager)
        if any(len(self.tokens[row]) + n > MAX_SEQ_LEN for row, n in zip(rows, more, strict=True)):
            with pytest.raises(InvalidRequestError, match=f"max_seq_len is {MAX_SEQ_LEN}"):
                self.manager.extend(rows, flat, **given)
            assert snapshot(self.manager) == before
            return
        starts = [len(self.tokens[row]) for row in rows]
        answer = self.manager.extend(rows, flat, **given)
        self.on_extend(answer, rows, added)
        if not isinstance(answer, Extended):
            assert snapshot(self.manager) == before
            return
        assert answer.slots.dtype == np.int64
        assert answer.slots.tolist() == self.manager.table.slots(rows, starts, more).tolist()
        source, target = answer.copies.T
        assert len(set(target.tolist())) == len(target)
        self.store[target] = self.store[source]
        self.store.reshape(-1)[answer.slots] = flat
        for row, tokens in zip(rows, added, strict=True):
            self.tokens[row] += tokens
            self.seen.append(list(self.tokens[row]))

    @precondition(lambda self: self.live)
    @rule(pick=picks, count=counts, everything=st.booleans())
    def commit(self, pick: list[int], count: list[int], everything: bool) -> None:
        rows = [row for row in dict.fromkeys(pick) if row in self.live]
        missing = [len(self.tokens[row]) - int(self.manager.table.computed[row]) for row in rows]
        done = missing if everything else [min(n, left) for n, left in zip(count, missing, strict=False)]
        self.manager.commit(rows, done)
        self.on_commit(rows, done)
        self.note_computed(rows)

    @precondition(lambda self: self.live)
    @rule(order=st.permutations(range(MAX_ROWS)))
    def commit_everything(self, order: list[int]) -> None:
        self.commit(order, [], True)

    @precondition(lambda self: self.live)
    @rule(order=st.permutations(range(MAX_ROWS)), token=st.sampled_from([1, 2]))
    def decode_step(self, order: list[int], token: int) -> None:
        ready = [row for row in order if row in self.live and len(self.tokens[row]) < MAX_SEQ_LEN]
        ready = [row for row in ready if self.manager.table.computed[row] == len(self.tokens[row])]
        self.extend(ready, [1] * MAX_ROWS, 0 if token == 1 else 2**30 - 1, "default")
        self.commit(ready, [1] * MAX_ROWS, True)

    @precondition(lambda self: self.handles)
    @rule(which=st.lists(st.integers(0, 40), min_size=1, max_size=4))
    def release(self, which: list[int]) -> None:
        """Newest first; handles may repeat and may be long dead."""
        given = [self.handles[-1 - at % len(self.handles)] for at in which]
        rows = list(dict.fromkeys(handle.row for handle in given if self.live.get(handle.row) == handle))
        self.manager.release(given)
        self.on_release(rows)
        for row in rows:
            del self.live[row], self.tokens[row], self.names[row]

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, MAX_ROWS - 1), branches=st.integers(1, 3), reserve=st.just(0) | st.integers(0, 5))
    def fork(self, at: int, branches: int, reserve: int) -> None:
        row = sorted(self.live)[at % len(self.live)]
        before = snapshot(self.manager)
        uncomputed = int(self.manager.table.computed[row]) < len(self.tokens[row])
        if uncomputed or len(self.tokens[row]) + reserve > MAX_SEQ_LEN:
            with pytest.raises(InvalidRequestError):
                self.manager.fork(row, branches, reserve=reserve)
            assert snapshot(self.manager) == before
            return
        answer = self.manager.fork(row, branches, reserve=reserve)
        self.on_fork(answer, row, branches, reserve)
        if not isinstance(answer, Forked):
            assert snapshot(self.manager) == before
            return
        for new in answer.sequences:
            self.live[new.row], self.names[new.row] = new, self.names[row]
            self.tokens[new.row] = list(self.tokens[row])
            self.handles.append(new)

    @precondition(lambda self: self.live)
    @rule(pick=picks, parents=st.lists(st.integers(0, MAX_ROWS - 1), min_size=MAX_ROWS, max_size=MAX_ROWS))
    def reorder(self, pick: list[int], parents: list[int]) -> None:
        live = sorted(self.live)
        rows = [row for row in dict.fromkeys(pick) if row in self.live]
        above = [live[at % len(live)] for at in parents[: len(rows)]]
        before = snapshot(self.manager)
        if any(int(self.manager.table.computed[row]) < len(self.tokens[row]) for row in above):
            with pytest.raises(InvalidRequestError, match="commit all of them"):
                self.manager.reorder(rows, above)
            assert snapshot(self.manager) == before
            return
        self.manager.reorder(rows, above)
        self.on_reorder(rows, above)
        tokens = [list(self.tokens[row]) for row in above]
        names = [self.names[row] for row in above]
        for row, held, name in zip(rows, tokens, names, strict=True):
            self.tokens[row], self.names[row] = held, name

    @precondition(lambda self: self.live)
    @rule(pick=picks, count=counts)
    def trim(self, pick: list[int], count: list[int]) -> None:
        rows = [row for row in dict.fromkeys(pick) if row in self.live]
        lengths = [max(1, len(self.tokens[row]) - n) for row, n in zip(rows, count, strict=False)]
        self.manager.trim(rows, lengths)
        self.on_trim(rows, lengths)
        for row, length in zip(rows, lengths, strict=True):
            self.tokens[row] = self.tokens[row][:length]

    @rule(name=st.sampled_from([EVERY_NAMESPACE, *NAMESPACES]))
    def reset(self, name: Hashable) -> None:
        names = NAMESPACES if name is EVERY_NAMESPACE else [name]
        self.on_reset(self.manager.reset(namespace=name), names)
        self.ever_computed = {prefix for prefix in self.ever_computed if prefix[0] not in names}

    @precondition(lambda self: self.seen)
    @rule(earlier=st.integers(0, 40), keep=st.integers(1, MAX_SEQ_LEN), name=st.sampled_from(NAMESPACES))
    def pin(self, earlier: int, keep: int, name: Hashable) -> None:
        tokens = self.seen[earlier % len(self.seen)][:keep]
        before = snapshot(self.manager)
        answer = self.manager.pin(tokens, name)
        self.on_pin(answer, tokens, name)
        if isinstance(answer, Pinned):
            assert answer.tokens == 0 or (name, tuple(tokens[: answer.tokens])) in self.ever_computed
            self.pinned.append(answer)
        else:
            assert snapshot(self.manager) == before

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, MAX_ROWS - 1))
    def hold(self, at: int) -> None:
        row = sorted(self.live)[at % len(self.live)]
        before = snapshot(self.manager)
        answer = self.manager.hold(row)
        self.on_hold(answer, row)
        if isinstance(answer, Pinned):
            assert answer.tokens == len(self.tokens[row])
            self.pinned.append(answer)
        else:
            assert snapshot(self.manager) == before

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 40))
    def unpin(self, which: int) -> None:
        """Newest first; the handle may be dead."""
        handle = self.pinned[-1 - which % len(self.pinned)]
        self.manager.unpin(handle)
        self.on_unpin(handle)

    @rule(jump=st.sampled_from([-3, 0, 1, 2, 10]))
    def tick(self, jump: int) -> None:
        """Clocks may also go back."""
        self.now += jump
        self.on_tick(self.manager.tick(self.now), self.now)

    @rule(
        name=st.sampled_from(NAMESPACES), floor=st.integers(0, 4), more=st.none() | st.integers(0, 6), off=st.booleans()
    )
    def set_limits(self, name: Hashable, floor: int, more: int | None, off: bool) -> None:
        floor, ceiling = (0, None) if off else (floor, None if more is None else max(floor + more, 1))
        before = snapshot(self.manager)
        floors = sum(limit.floor for limit in self.manager.tenants.limits.values())
        others = floors - self.manager.namespace_usage(name).floor
        if others + floor > self.manager.num_pages:
            with pytest.raises(ConfigError, match="exceeds"):
                self.manager.set_limits(name, floor=floor, ceiling=ceiling)
            assert snapshot(self.manager) == before
            return
        self.manager.set_limits(name, floor=floor, ceiling=ceiling)
        self.on_limits(name, floor, ceiling)

    @rule(wanted=st.integers(0, 20))
    def resize(self, wanted: int) -> None:
        before = snapshot(self.manager)
        if wanted < max(self.manager.tenants.floors, 1):
            with pytest.raises(ConfigError, match=f"a pool of {wanted} pages"):
                self.manager.resize(wanted)
            assert snapshot(self.manager) == before
            return
        answer = self.manager.resize(wanted)
        self.on_resize(answer, wanted)
        assert answer.num_pages == wanted + answer.held
        source, target = answer.copies.T
        grown = np.zeros((answer.num_pages + 1, self.manager.page_size), np.int64)
        kept = min(len(grown), len(self.store))
        grown[:kept] = self.store[:kept]
        grown[target] = self.store[source]
        self.store = grown

    @rule(row=st.integers(-1, MAX_ROWS), twice=st.booleans())
    def wrong_rows(self, row: int, twice: bool) -> None:
        if row in self.live and not twice:
            return
        before = snapshot(self.manager)
        error = InvalidRequestError if row in self.live else StaleSequenceError
        with pytest.raises(error):
            self.manager.extend([row, row], [1, 1])
        with pytest.raises(error):
            self.manager.commit([row, row], [0, 0])
        assert snapshot(self.manager) == before

    def note_computed(self, rows: list[int]) -> None:
        size = self.manager.page_size
        for row in rows:
            for end in range(size, int(self.manager.table.computed[row]) + 1, size):
                self.ever_computed.add((self.names[row], tuple(self.tokens[row][:end])))

    @rule(on=st.booleans())
    def watch(self, on: bool) -> None:
        """Look at everything after each step, or leave pages that decode steps have filled to be indexed later."""
        self.watched = on

    @invariant()
    def verify(self) -> None:
        self.nothing_is_broken()
        self.every_row_reads_what_was_put_in()
        self.only_equal_prefixes_of_one_namespace_share()
        if self.watched:
            self.pages_add_up()
            self.agrees_with_the_model()

    def agrees_with_the_model(self) -> None: ...

    def nothing_is_broken(self) -> None:
        assert audit(self.manager) == []
        self.follower.agrees_with(self.manager)

    def teardown(self) -> None:
        """The record of all calls leads a fresh manager to the same state."""
        if hasattr(self, "recording"):
            assert_same_arrays(self.manager.snapshot(), self.recording.replay(self.hasher).snapshot())

    def every_row_reads_what_was_put_in(self) -> None:
        for row, tokens in self.tokens.items():
            assert int(self.manager.table.length[row]) == len(tokens)
            assert self.store[self.manager.table.table[row]].reshape(-1)[: len(tokens)].tolist() == tokens
            if self.manager.prefix_caching:
                assert held_tokens(self.manager, row) == tokens

    def only_equal_prefixes_of_one_namespace_share(self) -> None:
        size = self.manager.page_size
        meaning: dict[int, tuple[Hashable, tuple[int, ...]]] = {}
        for row, tokens in self.tokens.items():
            for column in range(int(self.manager.table.pages[row])):
                page = int(self.manager.table.table[row, column])
                prefix = (self.names[row], tuple(tokens[: (column + 1) * size]))
                other = meaning.get(page, prefix)
                short, long = sorted((prefix, other), key=lambda held: len(held[1]))
                assert (long[0], long[1][: len(short[1])]) == short
                meaning[page] = long

    def pages_add_up(self) -> None:
        usage = self.manager.usage()
        assert usage.used + usage.cached + usage.free == usage.total
        assert min(usage.used, usage.cached, usage.free, usage.promised, usage.saved) >= 0
        assert 0.0 <= usage.waste < 1.0


class ExactMachine(Machine):
    """Every answer and the whole state are predicted."""

    hasher = ChainHash(seed=3)

    @initialize(num_pages=st.integers(3, 16), page_size=st.integers(1, 4), caching=st.integers(0, 7))
    def start(self, num_pages: int, page_size: int, caching: int) -> None:
        self.build(num_pages, page_size, caching > 0, caching % 2 > 0)
        self.model = Model(num_pages, page_size, MAX_ROWS, caching > 0, caching % 2 > 0)

    def more_settings(self, rng: random.Random) -> dict[str, int]:
        return {"caching": rng.randint(0, 7)}

    def on_admit(self, answer: Any, prompt: list[int], options: dict[str, Any]) -> None:
        expected = self.model.admit(prompt, **options)
        if isinstance(expected, Row):
            assert isinstance(answer, Admitted), answer
            assert answer.cached_tokens == expected.computed
            self.model.rows[answer.sequence.row] = expected
        else:
            assert answer == expected

    def on_extend(self, answer: Any, rows: list[int], new: list[list[int]]) -> None:
        expected = self.model.extend(rows, new)
        assert isinstance(answer, Extended) if expected is None else answer == expected

    def on_commit(self, rows: list[int], count: list[int]) -> None:
        self.model.commit(rows, count)

    def on_release(self, rows: list[int]) -> None:
        self.model.release(rows)

    def on_fork(self, answer: Any, row: int, branches: int, reserve: int) -> None:
        expected = self.model.fork(row, branches, reserve)
        if isinstance(expected, list):
            assert isinstance(answer, Forked), answer
            self.model.rows |= {new.row: row for new, row in zip(answer.sequences, expected, strict=True)}
        else:
            assert answer == expected

    def on_reorder(self, rows: list[int], parents: list[int]) -> None:
        self.model.reorder(rows, parents)

    def on_trim(self, rows: list[int], lengths: list[int]) -> None:
        self.model.trim(rows, lengths)

    def on_reset(self, answer: ResetResult, names: list[Hashable]) -> None:
        assert (answer.dropped, answer.held) == self.model.reset(names)

    def on_pin(self, answer: Any, tokens: list[int], name: Hashable) -> None:
        expected = self.model.pin(tokens, name)
        if isinstance(expected, list):
            assert isinstance(answer, Pinned), answer
            assert answer.tokens == len(expected) * self.model.page_size
            self.model.pins[answer.number] = expected
        else:
            assert answer == expected

    def on_hold(self, answer: Any, row: int) -> None:
        expected = self.model.hold(row)
        if isinstance(expected, list):
            assert isinstance(answer, Pinned), answer
            self.model.pins[answer.number] = expected
        else:
            assert answer == expected

    def on_unpin(self, handle: Pinned) -> None:
        self.model.unpin(handle.number)

    def on_tick(self, demoted: int, now: float) -> None:
        assert demoted == self.model.tick(now)

    def on_limits(self, name: Hashable, floor: int, ceiling: int | None) -> None:
        self.model.limits.set(name, floor, ceiling)

    def on_resize(self, answer: Resized, wanted: int) -> None:
        assert answer.num_pages == self.model.resize(wanted)

    def agrees_with_the_model(self) -> None:
        self.the_same_pages_are_resident_in_the_same_order()
        self.the_same_rows_hold_the_same_pages()
        self.usage_says_the_same()
        self.match_foretells_the_next_admission()

    def the_same_pages_are_resident_in_the_same_order(self) -> None:
        names = {self.manager.namespaces.find(name): name for name in NAMESPACES}
        chains = {page: (names[root], tokens) for page, (root, tokens) in resident(self.manager).items()}
        assert sorted(chains.values(), key=repr) == sorted(self.model.index, key=repr)
        queued = self.manager.pool.queue.queued().tolist()
        assert [chains[page] for page in queued] == [page.key for page in self.model.order]

    def the_same_rows_hold_the_same_pages(self) -> None:
        assert sorted(self.live) == sorted(self.model.rows)
        real: dict[int, int] = {}
        for number, row in self.model.rows.items():
            ids = self.manager.table.table[number, : self.manager.table.pages[number]].tolist()
            assert len(ids) == len(row.pages)
            assert int(self.manager.table.computed[number]) == row.computed
            for page_id, page in zip(ids, row.pages, strict=True):
                assert real.setdefault(id(page), page_id) == page_id
                assert int(self.manager.pool.refcount[page_id]) == page.owners
        assert len(set(real.values())) == len(real)
        rows = list(self.model.rows)
        private = [sum(page.owners == 1 for page in self.model.rows[number].pages) for number in rows]
        assert self.manager.private_pages(rows).tolist() == private

    def usage_says_the_same(self) -> None:
        usage, model = self.manager.usage(), self.model
        assert (usage.free, usage.cached, usage.promised) == (model.free, len(model.idle), model.promised)
        filled: dict[int, int] = {}
        for row in model.rows.values():
            for column, page in enumerate(row.pages):
                seen = min(model.page_size, len(row.tokens) - column * model.page_size)
                filled[id(page)] = max(filled.get(id(page), 0), seen)
        for name in NAMESPACES:
            of = self.manager.namespace_usage(name)
            assert (of.used, of.promised) == (model.limits.used(name), model.limits.promised(name))
            assert of.cached == sum(page.namespace == name for page in model.idle)
            assert (of.floor, of.ceiling) == model.limits.of.get(name, (0, None))
        alone = model.pinned_alone()
        tokens = {pin.number: pin.tokens for pin in self.pinned}
        for number, pages in model.pins.items():
            for column, page in enumerate(pages):
                if page in alone:
                    seen = min(model.page_size, tokens[number] - column * model.page_size)
                    filled[id(page)] = max(filled.get(id(page), 0), seen)
        assert usage.tokens == sum(filled.values())
        assert usage.owned == sum(len(row.pages) for row in model.rows.values()) + len(alone)

    def match_foretells_the_next_admission(self) -> None:
        for prompt in self.seen[-3:]:
            for name in NAMESPACES[:2]:
                pages = len(self.model.match(prompt, name))
                expected = pages * self.model.page_size + self.model.part(prompt, name, pages)
                assert self.manager.match(prompt, name) == expected


class CollidingMachine(Machine):
    """Keys keep 2 bits: nearly every lookup collides. Sharing may only get less, never wrong."""

    hasher = NarrowHash(bits=2)


def some_retention(rng: random.Random) -> tuple[Retention, ...]:
    start = rng.randint(0, 9)
    end = rng.choice([None, start + rng.randint(1, 9)])
    return (Retention(start, end, rng.choice([0, 10, 60, 100]), rng.choice([None, 1, 5])),)


def assert_same_arrays(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype, name
        assert np.array_equal(array, right[name]), name


def walk(machine: Machine, seed: int, steps: int) -> Machine:
    """Far more steps than hypothesis takes in one example: queues wrap, rows and roots are reused many times."""
    rng = random.Random(seed)

    def numbers(most: int, length: int) -> list[int]:
        return [rng.randint(0, most) for _ in range(length)]

    def tokens() -> list[int]:
        return rng.choices([1, 2], k=rng.randint(1, 9))

    limited, resizing = rng.random() < 0.5, rng.random() < 0.5
    machine.start(**{"num_pages": rng.randint(4, 20), "page_size": rng.randint(1, 4)} | machine.more_settings(rng))
    for _ in range(steps):
        machine.watch(rng.random() < 0.6)
        verb = rng.choices(
            ["admit", "extend", "commit", "decode", "release", "branch", "keep"], weights=[6, 2, 6, 2, 6, 3, 2]
        )[0]
        if verb == "admit":
            machine.admit(
                tokens(),
                rng.choice([None, *range(12)]),
                rng.choice([4, 8, MAX_SEQ_LEN]),
                namespace=rng.choice(NAMESPACES[: rng.choice([1, 1, 3])]),
                reserve=rng.choice([0, 0, 0, rng.randint(1, 6)]),
                headroom=rng.choice([0, 0, 0, 1]),
                share_pending=rng.random() < 0.2,
                reuse=rng.random() < 0.9,
                retention=some_retention(rng) if rng.random() < 0.2 else (),
            )
        elif verb == "release" and machine.handles:
            machine.release(numbers(MAX_ROWS, rng.randint(1, 3)))
        elif machine.live and verb == "extend":
            form = rng.choice(["default", "one number", "array"])
            machine.extend(numbers(MAX_ROWS - 1, 3), numbers(4, MAX_ROWS), rng.getrandbits(30), form)
        elif machine.live and verb == "commit":
            machine.commit(numbers(MAX_ROWS - 1, rng.randint(1, 5)), numbers(6, MAX_ROWS), rng.random() < 0.7)
        elif machine.seen and verb == "keep":
            machine.tick(rng.choice([-3, 0, 1, 10]))
            if limited and rng.random() < 0.3:
                machine.set_limits(
                    rng.choice(NAMESPACES), rng.randint(0, 4), rng.choice([None, 0, 3, 6]), rng.random() < 0.3
                )
                machine.verify()
            if resizing and rng.random() < 0.2:
                machine.resize(rng.randint(1, 20))
                machine.verify()
            if rng.random() < 0.1:
                machine.reset(rng.choice([EVERY_NAMESPACE, *NAMESPACES]))
                machine.verify()
            if rng.random() < 0.2 and machine.live:
                machine.hold(rng.randint(0, MAX_ROWS - 1))
            elif rng.random() < 0.5:
                machine.pin(rng.randint(0, 40), rng.randint(1, MAX_SEQ_LEN), rng.choice(NAMESPACES))
            elif machine.pinned:
                machine.unpin(rng.randint(0, 40))
        elif machine.live and verb == "branch":
            machine.fork(rng.randint(0, MAX_ROWS - 1), rng.randint(1, 3), rng.choice([0, rng.randint(1, 5)]))
            machine.verify()
            machine.reorder(numbers(MAX_ROWS - 1, 3), numbers(MAX_ROWS - 1, MAX_ROWS))
            machine.verify()
            machine.trim(numbers(MAX_ROWS - 1, rng.randint(1, 3)), numbers(6, MAX_ROWS))
        elif machine.live and verb == "decode":
            machine.decode_step(rng.sample(range(MAX_ROWS), MAX_ROWS), rng.choice([1, 2]))
        machine.verify()
    return machine


@pytest.mark.parametrize("kind", [ExactMachine, CollidingMachine])
@pytest.mark.parametrize("seed", range(10))
def test_long_random_walk(kind: type[Machine], seed: int) -> None:
    machine = walk(kind(), seed, steps=300)
    machine.release(list(range(len(machine.handles))))
    for which in range(len(machine.pinned)):
        machine.unpin(which)
    machine.nothing_is_broken()
    assert machine.manager.usage().used == 0
    machine.teardown()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [ExactMachine, CollidingMachine])
@pytest.mark.parametrize("seed", range(100, 140))
def test_very_long_random_walk(kind: type[Machine], seed: int) -> None:
    walk(kind(), seed, steps=2000)


class TestExact(ExactMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = QUICK


class TestColliding(CollidingMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = QUICK


@pytest.mark.slow
@pytest.mark.timeout(0)
class TestExactLong(ExactMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = LONG


@pytest.mark.slow
@pytest.mark.timeout(0)
class TestCollidingLong(CollidingMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = LONG
