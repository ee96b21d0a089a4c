"""Victims: whose pages to take when a step runs out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagedkv.engine.request import Request


class Offer(NamedTuple):
    """A possible victim: pages it would have to compute again, and pages its going would bring."""

    request: Request
    cost: int
    gain: int


def fewest(offers: Sequence[Offer], shortage: int, priority: Callable[[Request], int]) -> list[Request]:
    """The fewest, cheapest victims that make up for the shortage; of the lowest priority first.

    Args:
        offers: in the order in which requests are to be served; those that bring nothing are passed over.
        priority: of a request; smaller is served first.
    """
    useful = [offer for offer in offers if offer.gain]
    victims: list[Request] = []
    while shortage > 0 and useful:
        lowest = priority(useful[-1].request)
        least = [offer for offer in useful if priority(offer.request) == lowest]
        enough = [offer for offer in least if offer.gain >= shortage]
        chosen = min(enough, key=_cost) if enough else max(least, key=_cost)
        victims.append(chosen.request)
        shortage -= chosen.gain
        useful.remove(chosen)
    return victims


def _cost(offer: Offer) -> tuple[int, int]:
    """Order of victims: fewest pages to compute again, then the latest arrival."""
    return offer.cost, -offer.request.arrival
