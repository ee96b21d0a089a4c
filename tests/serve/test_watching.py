"""Spectators: whoever comes, whenever, ends up with the picture that there is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pagedkv.errors import PagedKVError
from pagedkv.serve import watching
from pagedkv.serve.top import decoded_frame
from pagedkv.serve.watching import Watch

PAGES = 4


class Source:
    """Pages that change one after the other; a full frame only where it is asked for."""

    def __init__(self) -> None:
        self.state = [0] * PAGES
        self.turn = 0
        self.down = False

    async def frame(self, full: bool) -> dict[str, Any]:
        if self.down:
            raise PagedKVError("away")
        page = self.turn % PAGES
        self.state[page] += 1
        self.turn += 1
        pages = range(PAGES) if full else [page]
        return {
            "t": float(self.turn),
            "step": self.turn,
            "full": full,
            "num_pages": PAGES,
            "page_size": 16,
            "pages": _int32([number + 1 for number in pages]),
            "state": bytes(self.state[number] for number in pages),
            "account": _int32([0] * len(pages)),
            "parent": _int32([0] * len(pages)),
            "since": bytes(4 * len(pages)),
            "accounts": {},
            "tables": [],
            "requests": [],
            "gone": [],
        }

    async def figures(self) -> dict[str, Any]:
        raise PagedKVError("none")


def _int32(numbers: list[int]) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


class Spectator:
    """Reads a few events at a time, and keeps what they add up to."""

    def __init__(self, watch: Watch) -> None:
        self.stream = watch.events()
        self.picture = watching.Picture()
        self.kinds: list[str] = []

    async def read(self, count: int) -> None:
        for _ in range(count):
            kind, data = (await anext(self.stream)).decode().split("\n")[:2]
            self.kinds.append(kind.removeprefix("event: "))
            if self.kinds[-1] == "frame":
                self.picture.apply(decoded_frame(json.loads(data.removeprefix("data: "))))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "FRAMES_PER_SECOND", 1000)
    monkeypatch.setattr(watching, "DOWN_SECONDS", 0.01)


def test_one_who_comes_while_another_looks_misses_nothing() -> None:
    """Even if it is slow to read its first events: frames that come meanwhile are kept for it."""

    async def run() -> None:
        source = Source()
        watch = Watch(source, {})
        first = Spectator(watch)
        await first.read(5)
        late = Spectator(watch)
        await late.read(2)  # what there is, and then it takes its time
        await asyncio.sleep(0.02)
        await late.read(1)
        assert late.kinds[:2] == ["hello", "frame"]
        steps = late.picture.step
        assert late.picture.state[1:].tolist() == [(steps + PAGES - 1 - page) // PAGES for page in range(PAGES)]
        watch.end()
        await watch.stop()

    asyncio.run(run())


def test_one_who_comes_just_after_the_last_one_left_begins_with_all() -> None:
    """A page that is loaded again: the look-out of the one before still goes round."""

    async def run() -> None:
        watch = Watch(Source(), {})
        first = Spectator(watch)
        await first.read(5)
        await first.stream.aclose()
        again = Spectator(watch)
        await again.read(3)
        assert again.picture.num_pages == PAGES
        await watch.stop()

    asyncio.run(run())


def test_one_who_is_far_behind_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MOST_BEHIND", 3)

    async def run() -> None:
        watch = Watch(Source(), {})
        slow = Spectator(watch)
        await slow.read(3)
        await asyncio.sleep(0.05)
        await slow.read(4)
        steps = slow.picture.step
        assert slow.picture.state[1:].tolist() == [(steps + PAGES - 1 - page) // PAGES for page in range(PAGES)]
        await watch.stop()

    asyncio.run(run())


def test_an_engine_that_is_away_is_said_and_comes_back_whole() -> None:
    async def run() -> None:
        source = Source()
        watch = Watch(source, {})
        spectator = Spectator(watch)
        await spectator.read(3)
        source.down = True
        while "down" not in spectator.kinds:
            await spectator.read(1)
        source.down = False
        source.state = [9] * PAGES
        while spectator.kinds[-1] != "frame":
            await spectator.read(1)
        assert spectator.picture.state[1:].tolist() == source.state
        await watch.stop()

    asyncio.run(run())


def test_all_are_let_go_at_the_end() -> None:
    async def run() -> None:
        watch = Watch(Source(), {})
        spectator = Spectator(watch)
        await spectator.read(2)
        watch.end()
        async for _ in spectator.stream:
            pass
        await watch.stop()

    asyncio.run(asyncio.wait_for(run(), 5))
