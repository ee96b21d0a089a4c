"""Tenants: how many pages a namespace is sure of, and how many it may have at most.

A floor is kept by admission: others leave so many pages available that the namespace can always come up to it. Eviction
keeps it too: others do not evict the content with which it comes up to it. A ceiling bounds what a namespace uses, and
its cached pages make room first when it takes more.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.accounts import Accounts
from pagedkv.cache.eviction import Pages
from pagedkv.cache.journal import Journal
from pagedkv.cache.outcomes import Wait
from pagedkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """Pages of one namespace.

    Attributes:
        used: with at least one owner.
        cached: without one, but served by the index.
        promised: set aside for its rows and not drawn yet.
        floor: what it is sure of.
        ceiling: what used and promised pages may come to; None without a limit.
    """

    used: int
    cached: int
    promised: int
    floor: int = 0
    ceiling: int | None = None


@dataclass(frozen=True, slots=True)
class _Limit:
    name: Hashable
    floor: int
    ceiling: int | None


@dataclass(frozen=True, slots=True)
class Demand:
    """What one verb wants for one account: pages taken, idle cached pages it would own again, and more promises."""

    taken: int = 0
    revived: int = 0
    promised: int = 0


NO_DEMANDS: Mapping[int, Demand] = {}


class Tenants:
    """The limits, by account, and what they allow."""

    def __init__(self, accounts: Accounts, journal: Journal) -> None:
        self.journal = journal
        self.limits: dict[int, _Limit] = {}
        self._accounts = accounts

    @property
    def floors(self) -> int:
        """Pages that all namespaces together are sure of."""
        return sum(limit.floor for limit in self.limits.values())

    def limit(self, account: int, name: Hashable, floor: int, ceiling: int | None, num_pages: int) -> None:
        """Set the limits of an account; (0, None) takes them away.

        Raises:
            ConfigError: a limit is negative, the ceiling is below the floor, or all floors exceed the pool.
        """
        if floor < 0 or (ceiling is not None and ceiling < max(floor, 1)):
            raise ConfigError(f"a floor of {floor} and a ceiling of {ceiling} pages: need 0 <= floor <= ceiling >= 1")
        others = self.floors - (self.limits[account].floor if account in self.limits else 0)
        if others + floor > num_pages:
            raise ConfigError(f"a floor of {floor} pages beside {others} of other namespaces exceeds {num_pages} pages")
        self.journal.entry(self.limits, account)
        self.limits.pop(account, None)
        if floor or ceiling is not None:
            self.limits[account] = _Limit(name, floor, ceiling)

    def refusal(
        self, demands: dict[int, Demand], available: int, promised: NDArray[np.int64], headroom: int = 0
    ) -> Wait | None:
        """Why these demands would break a limit.

        Args:
            demands: per account.
            available: pages that can be handed out now.
            promised: int64 [accounts or more], pages promised to each account's rows.
            headroom: pages that shall stay available beyond all limits.
        """
        for account, demand in demands.items():
            answer = self._over_ceiling(account, demand, int(promised[account]))
            if answer is not None:
                return answer
        taken = sum(demand.taken for demand in demands.values())
        revived = sum(demand.revived for demand in demands.values())
        before = available - self.obliged(promised)
        after = available - taken - revived - self.obliged(promised, demands)
        missing = min(before, 0) - (after - headroom)
        if missing > 0:
            needed = taken + sum(demand.promised for demand in demands.values()) + headroom
            return Wait(needed, max(needed - missing, 0))
        return None

    def _over_ceiling(self, account: int, demand: Demand, promised: int) -> Wait | None:
        limit = self.limits.get(account)
        if limit is None or limit.ceiling is None:
            return None
        room = limit.ceiling - self._used(account) - promised
        more = demand.taken + demand.revived + demand.promised
        if more > max(room, 0):
            return Wait(more, max(room, 0), on="ceiling", namespace=limit.name)
        return None

    def floor(self, account: int) -> int:
        """What the account is sure of."""
        return self.limits[account].floor if account in self.limits else 0

    def ceiling(self, account: int) -> int | None:
        """What the account may use at most; None without a limit."""
        return self.limits[account].ceiling if account in self.limits else None

    def lack(self, account: int, promised: int) -> int:
        """Pages that the account lacks to its floor, with so many promised to its rows."""
        return max(self.floor(account) - self._used(account) - promised, 0)

    def capacity(self, account: int, num_pages: int) -> int:
        """Most pages that rows of the account can ever have: what floors of others and its ceiling leave."""
        most = num_pages - self.floors + self.floor(account)
        ceiling = self.ceiling(account)
        return most if ceiling is None else min(most, ceiling)

    def promisable(self, account: int, available: int, promised: NDArray[np.int64]) -> int:
        """How many pages more may be promised to this account's rows; arguments as for `refusal`."""
        limit = self.limits.get(account, _Limit(None, 0, None))
        held = self._used(account) + int(promised[account])
        room = max(available - self.obliged(promised), 0) + max(limit.floor - held, 0)
        if limit.ceiling is not None:
            room = min(room, limit.ceiling - held)
        return max(min(room, available - int(promised.sum())), 0)

    def victims(self, order: Pages, missing: int, takers: Mapping[int, int]) -> Pages:
        """Which cached pages to evict, so that `missing` more become free or fewer stay where a ceiling is reached.

        Args:
            order: int32 [n], all cached pages in the order of eviction.
            missing: pages that the free ones lack; may be negative.
            takers: pages that each account takes.
        """
        account = self._accounts.of.take(order)
        chosen = np.zeros(order.size, np.bool_)
        kept = np.zeros(order.size, np.bool_)
        for number, limit in self.limits.items():
            own = np.flatnonzero(account == number)
            used = self._used(number) + takers.get(number, 0)
            if number in takers and limit.ceiling is not None:
                chosen[own[: max(used + own.size - limit.ceiling, 0)]] = True
            needed = max(limit.floor - used, 0)
            kept[own[max(own.size - needed, 0) :]] = True
        left = missing - int(chosen.sum())
        if left > 0:
            unkept = np.flatnonzero(~chosen & ~kept)
            chosen[unkept[:left]] = True
            chosen[np.flatnonzero(~chosen)[: max(left - unkept.size, 0)]] = True  # where a floor was raised too late
        return order[chosen]

    def exceeded(self, takers: Mapping[int, int]) -> dict[int, int]:
        """Of these accounts and the pages that each takes, those that would have more than their ceiling in all."""
        return {account: taken for account, taken in takers.items() if self._excess(account, taken) > 0}

    def _excess(self, account: int, taken: int) -> int:
        ceiling = self.ceiling(account)
        if ceiling is None or account >= self._accounts.used.size:
            return 0
        return self._used(account) + taken + int(self._accounts.cached[account]) - ceiling

    def _used(self, account: int) -> int:
        return int(self._accounts.used[account]) if account < self._accounts.used.size else 0

    def obliged(self, promised: NDArray[np.int64], demands: Mapping[int, Demand] = NO_DEMANDS) -> int:
        """Pages that must be available once the demands are met: promises, and what each lacks to its floor."""
        total = int(promised.sum()) + sum(demand.promised for demand in demands.values())
        for account, limit in self.limits.items():
            demand = demands.get(account, Demand())
            held = self._used(account) + demand.taken + demand.revived + int(promised[account]) + demand.promised
            total += max(limit.floor - held, 0)
        return total
