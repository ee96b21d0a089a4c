"""Replay: a record in the page map, with pause, step, speed and a slider of time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from pagedkv.errors import InvalidRequestError
from pagedkv.monitor.frames import STATE_NAMES
from pagedkv.monitor.picture import Picture
from pagedkv.monitor.record import Moment, Record
from pagedkv.serve.answers import Json
from pagedkv.serve.error_responses import add_error_handlers
from pagedkv.serve.monitoring import add_page_map
from pagedkv.serve.watching import HISTORY, event

KEYFRAMES = 64
"""Full pictures kept, so that a jump need not begin at the beginning."""
SHORTEST = 0.05
"""Seconds between two events; a faster replay passes over frames."""


class Order(BaseModel):
    """What the controls ask for; one of these at a time."""

    model_config = ConfigDict(extra="forbid")

    play: bool | None = None
    step: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    speed: Annotated[float, Field(gt=0, le=1000)] | None = None
    frame: Annotated[int, Field(ge=0)] | None = None


class Player:
    """One position in a record, which moves by itself while it plays; all spectators see the same.

    Attributes:
        at: number of the frame that is shown.
        picture: what all frames up to it add up to.
    """

    def __init__(self, record: Record) -> None:
        if not len(record):
            raise InvalidRequestError("the record holds no step")
        self.record = record
        self.times = []
        self.figures: list[tuple[int, dict[str, Any]]] = []
        self.at = 0
        self.playing = False
        self.speed = 1.0
        self.picture = Picture()
        self._every = max(1, -(-len(record) // KEYFRAMES))
        self._keyframes: list[dict[str, Any]] = []
        for number, moment in enumerate(record):
            self.picture.apply(moment.frame)
            self.times.append(self.picture.t)
            if number % self._every == 0:
                self._keyframes.append(self.picture.full_frame())
            if moment.figures is not None:
                self.figures.append((number, moment.figures))
        self.go(0)

    def go(self, number: int) -> None:
        """Show this frame."""
        number = min(max(number, 0), len(self.record) - 1)
        begin = self.at
        if number < self.at or number // self._every > self.at // self._every:
            begin = number // self._every * self._every
            self.picture = Picture()
            self.picture.apply(self._keyframes[number // self._every])
        for between in range(begin + 1, number + 1):
            self.picture.apply(self.record[between].frame)
        self.at = number

    def moment(self) -> Moment:
        """The step that is shown."""
        return self.record[self.at]

    def history(self) -> list[dict[str, Any]]:
        """Figures of the minutes before."""
        return [figures for number, figures in self.figures if number <= self.at][-HISTORY:]

    def frame(self) -> dict[str, Any]:
        """The picture, and where it stands in the record."""
        moment = {"frame": self.at, "t": self.times[self.at], "playing": self.playing}
        return {**self.picture.full_frame(), "moment": moment}

    def obey(self, order: Order) -> None:
        """Do what a control asks for."""
        if order.play is not None:
            self.playing = order.play
            if self.playing and self.at == len(self.record) - 1:
                self.go(0)
        if order.speed is not None:
            self.speed = order.speed
        if order.frame is not None:
            self.go(order.frame)
        if order.step is not None:
            self.playing = False
            self.go(self.at + order.step)

    def advance(self, seconds: float) -> None:
        """Let so much time pass: to the last frame that has begun by then."""
        wanted = self.times[self.at] + seconds * self.speed
        number = self.at
        while number + 1 < len(self.times) and self.times[number + 1] <= wanted:
            number += 1
        self.go(number)
        self.playing = self.playing and self.at < len(self.record) - 1

    def pause(self) -> float:
        """Seconds until the next frame is due."""
        if self.at + 1 >= len(self.times):
            return SHORTEST
        return max((self.times[self.at + 1] - self.times[self.at]) / self.speed, SHORTEST)


class _Replay:
    """The endpoints."""

    def __init__(self, player: Player) -> None:
        self.player = player
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Let the player move."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        yield
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            pause = self.player.pause() if self.player.playing else SHORTEST
            await asyncio.sleep(pause)
            if self.player.playing:
                self.player.advance(pause)
                self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def stream(self) -> Response:
        """The same events as a live server's."""
        return StreamingResponse(self._events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def _events(self) -> AsyncIterator[bytes]:
        replay = {"frames": len(self.player.record), "seconds": self.player.times[-1]}
        yield event("hello", {"replay": replay, "figures": self.player.history()})
        shown = -1
        while True:
            changed = self._changed
            yield event("frame", self.player.frame())
            if abs(self.player.at - shown) > 1:
                yield event("hello", {"replay": replay, "figures": self.player.history()})
            elif (figures := self.player.moment().figures) is not None:
                yield event("figures", figures)
            shown = self.player.at
            await changed.wait()

    async def order(self, order: Order) -> Json:
        """Play, pause, step, jump, or another speed."""
        self.player.obey(order)
        self._tell()
        return {"frame": self.player.at, "playing": self.player.playing, "speed": self.player.speed}

    async def page(self, page: int) -> Json:
        """What the record knows of a page; tokens are not in it."""
        picture = self.player.picture
        if not 1 <= page <= picture.num_pages:
            raise InvalidRequestError(f"there is no page {page}; pages are 1 to {picture.num_pages}")
        found = picture.page(page)
        return {**found, "state": STATE_NAMES[found["state"]], "tokens": None, "text": ""}


def build_replay(record: Record) -> FastAPI:
    """The page map over a record."""
    replay = _Replay(Player(record))
    app = FastAPI(title="pagedkv replay", lifespan=replay.lifespan)
    app.get("/v1/pool/stream", response_model=None)(replay.stream)
    app.post("/v1/replay")(replay.order)
    app.get("/v1/pool/pages/{page}")(replay.page)
    add_page_map(app)
    add_error_handlers(app)
    return app
