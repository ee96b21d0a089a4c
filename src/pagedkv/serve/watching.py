"""Watching: one engine's frames and figures, handed on to any number of spectators as server-sent events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from pagedkv.errors import PagedKVError
from pagedkv.monitor.frames import Frame
from pagedkv.monitor.picture import Picture

FRAMES_PER_SECOND = 10
FIGURES_SECONDS = 1.0
HISTORY = 600
"""Figures kept, one per second: ten minutes for whoever comes later."""
MOST_BEHIND = 32
"""Events that a spectator may be behind before it begins anew."""
DOWN_SECONDS = 1.0


class Source(Protocol):
    """Where frames and figures come from; PagedKVError while there are none."""

    async def frame(self, full: bool) -> Frame:
        """What has changed since the last frame."""
        ...

    async def figures(self) -> dict[str, Any]:
        """The figures of this moment."""
        ...


class Watch:
    """Looks at a source for all spectators together, and only while there are some; figures are always kept.

    Args:
        source: asked by nobody else.
        hello: said to each spectator first.
    """

    def __init__(self, source: Source, hello: dict[str, Any]) -> None:
        self.picture = Picture()
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._source = source
        self._hello = hello
        self._spectators: set[asyncio.Queue[bytes]] = set()
        self._ended = False
        self._looking: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Keep figures from now on."""
        self._counting = asyncio.get_running_loop().create_task(self._count())

    async def stop(self) -> None:
        """Keep nothing any more."""
        tasks = [task for task in (self._counting, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events for one spectator, until it leaves."""
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        queue.put_nowait(event("hello", {**self._hello, "figures": list(self.history)}))
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
        elif self.picture.num_pages:  # whoever looks already gets changes only
            queue.put_nowait(event("frame", self.picture.full_frame()))
        self._spectators.add(queue)  # before anything is awaited, so that no frame is missed
        try:
            while not self._ended:
                message = await queue.get()
                if message:
                    yield message
        finally:
            self._spectators.discard(queue)

    def end(self) -> None:
        """Let all spectators go: the server is about to end."""
        self._ended = True
        for queue in self._spectators:
            queue.put_nowait(b"")

    async def _look(self) -> None:
        """Frames, as long as somebody looks. The first is a full one, since deltas may have been lost."""
        full = True
        while self._spectators:
            try:
                frame = await self._source.frame(full)
            except PagedKVError:
                full = True
                self._tell(event("down", {}))
                await asyncio.sleep(DOWN_SECONDS)
                continue
            self.picture.apply(frame)
            full = False
            if not is_empty(frame):
                self._tell(event("frame", frame))
            await asyncio.sleep(1 / FRAMES_PER_SECOND)

    async def _count(self) -> None:
        """Figures, once a second."""
        while True:
            try:
                self.history.append(await self._source.figures())
                self._tell(event("figures", self.history[-1]))
            except PagedKVError:
                pass
            await asyncio.sleep(FIGURES_SECONDS)

    def _tell(self, message: bytes) -> None:
        for queue in self._spectators:
            if queue.qsize() >= MOST_BEHIND:
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(event("frame", self.picture.full_frame()))
            else:
                queue.put_nowait(message)


def is_empty(frame: Frame) -> bool:
    """Does a frame say nothing new?"""
    return not (frame["full"] or frame["pages"] or frame["tables"] or frame["requests"] or frame["gone"])


def event(kind: str, value: dict[str, Any]) -> bytes:
    """One server-sent event; bytes within the value become base64."""
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(value) + b"\n\n"
