"""GroupedManager: layers of several kinds under one manager, each kind with its own pool, page bytes and window.

::

    full attention     every token's page, for as long as the sequence lives
    window of 1024     pages of the last 1024 tokens; what fell out of the window is given back at once

A prompt is admitted into all groups or into none, and shares a cached prefix only as far as every group can serve it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.budget import pages_for_tokens
from pagedkv.cache.checks import checked_counts, checked_prompt
from pagedkv.cache.events import EventKind
from pagedkv.cache.eviction import Pages
from pagedkv.cache.hashing import ChainHash, Keys
from pagedkv.cache.journal import atomic
from pagedkv.cache.layers import GroupUsage, LayerGroup, Placed, checked_groups
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.outcomes import Admitted, Forked, Never, Sequence, Wait
from pagedkv.cache.pins import EVERY_NAMESPACE, ResetResult
from pagedkv.cache.table import Rows
from pagedkv.cache.windowed import WindowedGroup
from pagedkv.errors import InvalidRequestError


class _Leader(KVCacheManager):
    """The manager whose pages the groups follow: it matches no more of a prompt than they can serve."""

    nested = True
    followers: tuple[WindowedGroup, ...] = ()

    def find_cached(self, prompt: NDArray[np.int32], root: int) -> tuple[Pages, Keys, Keys]:
        matched, keys, sums = super().find_cached(prompt, root)
        usable = -1
        while matched.size != usable:
            usable = matched.size
            for group in self.followers:
                matched = matched[: group.usable(matched)]
        return matched, keys, sums


class GroupedManager:
    """Who owns which page of which group. The verbs are those of KVCacheManager, and `place` before each prefill chunk.

    ::

        admit(prompt) -> row       all groups or none; windowed groups set aside a window and a step
        place(rows, counts)        places for the next tokens that will be computed, at most `step` per row
        extend(rows, tokens)       append tokens and place them: a decode step
        commit(rows, counts)       they are in place; what no query will see any more is given back

    Groups with full attention share one table and one numbering of pages, whose pool is the smallest of theirs.

    Args:
        groups: at least one, with different names.
        page_size: tokens per page, in all groups.
        max_rows: most sequences at once.
        max_seq_len: most tokens of one sequence.
        step: most tokens of one row that are computed at once.

    Raises:
        ConfigError: no group, two of one name, or sizes that are not positive.
    """

    nested = False

    def __init__(
        self,
        groups: Iterable[LayerGroup],
        page_size: int,
        *,
        max_rows: int,
        max_seq_len: int,
        step: int,
        prefix_caching: bool = True,
        hasher: ChainHash | None = None,
    ) -> None:
        self.groups = checked_groups(groups, step)
        columns = pages_for_tokens(max_seq_len, page_size)
        full = [group.num_pages for group in self.groups.values() if group.window is None]
        virtual = max_rows * columns + max(group.num_pages for group in self.groups.values())
        num_pages = min(full, default=virtual)  # without full attention, pages only stand for places in the index
        self.step = step
        self.page_size = page_size
        self.leader = _Leader(
            num_pages,
            page_size,
            max_rows=max_rows,
            max_seq_len=max_seq_len,
            prefix_caching=prefix_caching,
            hasher=hasher,
        )
        self.journal = self.leader.journal
        self.leader.events.start(8 * (num_pages + max_rows * columns))
        self._read = 0
        self.windowed = {
            group.name: WindowedGroup(
                group.num_pages, group.window, step, self.leader.table, num_pages, self.leader.journal
            )
            for group in self.groups.values()
            if group.window is not None
        }
        self.leader.followers = tuple(self.windowed.values())

    @property
    def tables(self) -> dict[str, NDArray[np.int32]]:
        """The block table of each group, int32 [max_rows, columns]; page 0 where nothing is held."""
        table = self.leader.table.table
        return {name: self.windowed[name].table if name in self.windowed else table for name in self.groups}

    @atomic
    def admit(
        self, tokens: ArrayLike, *, namespace: Hashable = None, reserve: int = 0, headroom: int = 0, owner: str = ""
    ) -> Admitted | Wait | Never:
        """`KVCacheManager.admit` over all groups. Pages of windowed groups are set aside; `place` takes them."""
        leader = self.leader
        prompt = checked_prompt(tokens, reserve, headroom, leader.max_seq_len)
        self._catch_up()
        whole = pages_for_tokens(prompt.size + reserve, self.page_size)
        matched = leader.find_cached(prompt, leader.namespaces.find(namespace))[0]
        for group in self.windowed.values():
            need = group.demand(matched.size, whole)
            if need > group.num_pages:
                return Never(need, group.num_pages)
            free = group.pool.available - group.reservations.promised - group.idle(matched)
            if need + headroom > free:
                return Wait(need + headroom, max(free, 0))
        answer = leader.admit(prompt, namespace=namespace, reserve=reserve, headroom=headroom, owner=owner)
        self._sync()
        if isinstance(answer, Admitted):
            for group in self.windowed.values():
                group.open(answer.sequence.row, matched, whole)
        return answer

    @atomic
    def place(self, rows: ArrayLike, counts: ArrayLike) -> Placed | Wait:
        """Places for the next counts[i] tokens of rows[i] that are to be computed, for all rows or for none.

        Raises:
            StaleSequenceError, InvalidRequestError: rows are wrong, or a count exceeds `step` or what the row has left.
        """
        at = self.leader.table.checked(rows)
        more = checked_counts(counts, at.size)
        start = self.leader.table.computed[at].astype(np.int64)
        left = self.leader.table.length[at] - start
        wrong = np.flatnonzero(more > np.minimum(left, self.step))
        if wrong.size:
            row, count, most = int(at[wrong[0]]), int(more[wrong[0]]), int(left[wrong[0]])
            raise InvalidRequestError(f"{count} tokens of row {row} at once; it has {most} left, step {self.step}")
        return self._shortage(at, start + more) or self._placed(at, start, more, {})

    @atomic
    def extend(self, rows: ArrayLike, tokens: ArrayLike, counts: ArrayLike = 1) -> Placed | Wait | Never:
        """Append tokens to rows that are computed up to their end, and place them.

        Raises:
            StaleSequenceError, InvalidRequestError: rows or tokens are wrong, tokens of a row are not committed, more
                than `step` tokens for a row, or a row would exceed max_seq_len.
        """
        leader, table = self.leader, self.leader.table
        at = table.checked(rows)
        more = checked_counts(counts, at.size)
        start = table.length[at].astype(np.int64)
        if (table.computed[at] < start).any() or more.max(initial=0) > self.step:
            raise InvalidRequestError(f"rows are extended by at most {self.step} tokens, once all theirs are committed")
        writers = leader.shares_tail[at] & (more > 0)
        refusal = self._shortage(at, start + more, writers)
        if refusal is not None:
            return refusal
        answer = leader.extend(at, tokens, counts)
        moved = self._forget()
        if isinstance(answer, (Wait, Never)):
            if moved:
                self._reattach()
            return answer
        copying = at[np.isin(table.at(at, start // self.page_size), answer.copies[:, 1]) & writers]
        columns = table.length[copying].astype(np.int64)
        columns -= more[np.isin(at, copying)]
        copies = {
            name: group.copy(copying, columns // self.page_size, leader.index.indexed)
            for name, group in self.windowed.items()
        }
        placed = self._placed(at, start, more, copies | dict.fromkeys(self._full(), answer.copies))
        if moved:
            self._reattach()
        return placed

    @atomic
    def commit(self, rows: ArrayLike, counts: ArrayLike) -> None:
        """Keys and values of the next counts[i] tokens are in place in all groups.

        Raises:
            StaleSequenceError, InvalidRequestError: rows are wrong, or tokens have no place or are not the row's.
        """
        at = self.leader.table.checked(rows)
        computed = self.leader.table.computed[at] + checked_counts(counts, at.size)
        for name, group in self.windowed.items():
            if (computed > group.back[at] * self.page_size).any():
                raise InvalidRequestError(f"tokens are committed that have no place in group {name!r}; see `place`")
        self.leader.commit(at, counts)
        if any(group.window <= self.page_size for group in self.windowed.values()):
            self.leader.index_filled()  # else a page may leave before it is indexed
        self._sync()
        for group in self.windowed.values():
            group.advance(at, computed, self.leader.index.indexed)

    @atomic
    def release(self, sequences: Iterable[Sequence]) -> None:
        """Give back rows, pages and promises in all groups; handles given back before are ignored."""
        at = self.leader.table.still_open(given := list(sequences))
        self._catch_up()
        self.leader.release(given)
        for group in self.windowed.values():
            group.close(at, self.leader.index.indexed)
        self._sync()

    @atomic
    def fork(self, row: int, branches: int = 1) -> Forked | Wait:
        """`KVCacheManager.fork`; what has left a window stays null in the branches."""
        answer = self.leader.fork(row, branches)
        self._sync()
        if isinstance(answer, Forked):
            rows = np.array([sequence.row for sequence in answer.sequences])
            self._follow(rows, np.full(branches, row))
        return answer

    @atomic
    def reorder(self, rows: ArrayLike, parents: ArrayLike) -> None:
        """`KVCacheManager.reorder`."""
        self._catch_up()
        self.leader.reorder(rows, parents)
        at, above = np.atleast_1d(np.asarray(rows)), np.atleast_1d(np.asarray(parents))
        self._follow(at[at != above].astype(np.int64), above[at != above].astype(np.int64))
        self._sync()

    @atomic
    def trim(self, rows: ArrayLike, lengths: ArrayLike) -> None:
        """`KVCacheManager.trim`.

        Raises:
            InvalidRequestError: also if the next query of a row would see tokens that have left a window.
        """
        at = self.leader.table.checked(rows)
        keep = checked_counts(lengths, at.size, "length")
        for name, group in self.windowed.items():
            lost = group.first_column(keep) < group.front[at]
            if lost.any():
                raise InvalidRequestError(
                    f"row {at[lost][0]} cannot go back to {keep[lost][0]} tokens: what the next one sees has left "
                    f"the window of group {name!r}"
                )
        self._catch_up()
        self.leader.trim(at, keep)
        for group in self.windowed.values():
            group.cut(at, -(-keep // self.page_size), self.leader.index.indexed)
        self._sync()

    @atomic
    def match(self, tokens: ArrayLike, namespace: Hashable = None) -> int:
        """Tokens of this prompt that `admit` would find cached now, in every group."""
        matched = self.leader.match(tokens, namespace)
        self._sync()
        return matched

    @atomic
    def reset(self, *, namespace: Hashable = EVERY_NAMESPACE) -> ResetResult:
        """`KVCacheManager.reset`; the figures are those of full attention."""
        answer = self.leader.reset(namespace=namespace)
        self._sync()
        return answer

    @atomic
    def usage(self) -> dict[str, GroupUsage]:
        """Where the pages of each group are now."""
        self._catch_up()
        found = {}
        for name, group in self.groups.items():
            part = self.windowed.get(name, self.leader)
            pool, promised = part.pool, part.reservations.promised
            free = pool.free + group.num_pages - part.num_pages
            found[name] = GroupUsage(
                group.num_pages, pool.used, pool.cached, free, promised, pool.used * group.page_bytes
            )
        return found

    def _full(self) -> list[str]:
        return [name for name in self.groups if name not in self.windowed]

    def _shortage(self, rows: Rows, ends: NDArray[np.int64], copying: NDArray[np.bool_] | None = None) -> Wait | None:
        """Why the windowed groups have no places up to ends[i] tokens of rows[i]."""
        columns = -(-ends // self.page_size)
        for group in self.windowed.values():
            need = np.maximum(columns - group.back[rows], 0)
            if copying is not None:
                need = need + copying
            refusal = group.reservations.shortage(rows, need, group.pool.available)
            if refusal is not None:
                return refusal
        return None

    def _placed(
        self, rows: Rows, start: NDArray[np.int64], counts: NDArray[np.int64], copies: dict[str, NDArray[np.int32]]
    ) -> Placed:
        """Take the places in the windowed groups, which have them, and say where all tokens go."""
        for group in self.windowed.values():
            group.place(rows, -(-(start + counts) // self.page_size))
        owner = np.repeat(np.arange(rows.size), counts)
        position = start[owner] + np.arange(owner.size) - (np.cumsum(counts) - counts)[owner]
        column, offset = np.divmod(position, self.page_size)
        slots = {
            name: table[rows[owner], column].astype(np.int64) * self.page_size + offset
            for name, table in self.tables.items()
        }
        return Placed(slots, {name: copies.get(name, np.zeros((0, 2), np.int32)) for name in self.groups})

    def _follow(self, rows: Rows, parents: Rows) -> None:
        for group in self.windowed.values():
            group.follow(rows, parents, self.leader.index.indexed)

    def _catch_up(self) -> None:
        """Index what can be indexed, while the groups' tables are the leader's."""
        self.leader.index_filled()
        self._sync()

    def _sync(self) -> None:
        """Let the groups know what has happened to the leader's pages."""
        if self._forget():
            self._reattach()

    def _reattach(self) -> None:
        """Rows have moved to twins: the groups' pages, whose tables are the leader's now, stand for those."""
        for group in self.windowed.values():
            group.reattach()

    def _forget(self) -> bool:
        """Let the groups know which of the leader's pages stand for nothing any more. May rows have moved to twins?"""
        batch = self.leader.events.read(self._read)
        assert not batch.lost, "one verb has overrun the ring of events"
        self.journal.keep(self, "_read")
        self._read = batch.first + batch.kind.size
        idle = (self.leader.pool.refcount[batch.page] == 0) & ~self.leader.index.indexed[batch.page]
        freed = idle & (batch.kind == EventKind.RELEASED)
        gone = freed | (batch.kind == EventKind.ALLOCATED) | (batch.kind == EventKind.FORGOTTEN)
        pages = np.unique(batch.page[gone])
        moved = [group.forget(pages) for group in self.windowed.values()]
        return any(moved)
