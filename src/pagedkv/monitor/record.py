"""Records: what happened to pages and requests, step by step, in one compressed file, and how it is read again.

::

    "PAGEDKV1" | zlib stream of: length (4 bytes, little-endian) | msgpack header
                                 length                          | msgpack {frame, log, figures}, one per step
                                 ...

The stream is flushed every second, so that a record whose server was killed can be read up to there. It holds no token
ids and no text; request ids and tenants' names it does hold.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pagedkv.engine.request import Request
from pagedkv.errors import InvalidRequestError
from pagedkv.monitor.frames import Frame, Frames
from pagedkv.monitor.monitor import Listener, Monitor
from pagedkv.monitor.page_feed import PageNews
from pagedkv.monitor.timings import Track

MAGIC = b"PAGEDKV1"
FLUSH_SECONDS = 1.0
FIGURES_SECONDS = 1.0

Entry = dict[str, Any]
"""t: seconds like a frame's. request: its id. key: number of the answer. what: see `Listener.happened`; and details."""


class RecordWriter(Listener):
    """Writes what a monitor tells. A listener of it.

    Args:
        monitor: who tells.
        path: of the file; one that is there is replaced.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, monitor: Monitor, path: Path) -> None:
        self.monitor = monitor
        self._frames = Frames(monitor, every_token=False)
        self._log: list[Entry] = []
        self._file: BinaryIO = path.open("wb")
        self._packer = zlib.compressobj(level=1)
        self._flushed = self._counted = float("-inf")
        self._file.write(MAGIC)
        engine = monitor.engine
        self._write(
            {
                "model": engine.model.name,
                "started": time.time(),
                "num_pages": engine.paged.num_pages,
                "page_size": engine.paged.page_size,
            }
        )

    def pages(self, news: PageNews, now: float) -> None:
        """See `Listener`."""
        self._frames.pages(news, now)

    def happened(self, request: Request, what: str, now: float, **details: Any) -> None:
        """See `Listener`."""
        entry = {"t": now - self.monitor.started, "request": request.id, "key": request.arrival, "what": what}
        if what == "ended":
            details = ending(request, details["track"], now)
        self._log.append(entry | details)

    def step_over(self, now: float) -> None:
        """See `Listener`."""
        message: dict[str, Any] = {"frame": self._frames.take(now), "log": self._log}
        self._log = []
        if now - self._counted >= FIGURES_SECONDS:
            self._counted = now
            message["figures"] = self.monitor.counters()
        self._write(message)
        if now - self._flushed >= FLUSH_SECONDS:
            self.flush()
            self._flushed = now

    def flush(self) -> None:
        """Have all of it in the file."""
        self._file.write(self._packer.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self.step_over(self.monitor.refresh())
        self._file.write(self._packer.flush())
        self._file.close()

    def _write(self, value: dict[str, Any]) -> None:
        packed = msgspec.msgpack.encode(value)
        self._file.write(self._packer.compress(len(packed).to_bytes(4, "little") + packed))


def ending(request: Request, track: Track, now: float) -> dict[str, Any]:
    """How a request has fared."""
    return {
        "reason": "" if request.finish_reason is None else request.finish_reason.value,
        "error": request.error or "",
        "prompt": int(request.prompt.size),
        "tokens": len(request.sampled),
        "cached": request.cached_tokens or 0,
        "missed": track.reason,
        "preemptions": request.preemptions,
        "queue": (track.admitted if track.admitted is not None else now) - track.queued,
        "first_token": None if track.first is None else track.first - track.queued,
        "in_all": now - track.queued,
    }


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a record."""

    frame: Frame
    log: list[Entry]
    figures: dict[str, Any] | None


class Record:
    """A record that was written before.

    Args:
        path: of the file.

    Attributes:
        header: model, time of the start, size of the pool.

    Raises:
        InvalidRequestError: the file cannot be read, or is no record.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"{path}: cannot be read: {error.strerror}") from None
        if not content.startswith(MAGIC):
            raise InvalidRequestError(f"{path} is no record of pagedkv")
        unpacked = _unpacked(content[len(MAGIC) :])
        self._messages = list(_split(unpacked))
        if not self._messages:
            raise InvalidRequestError(f"{path} ends before its first step")
        self.header: dict[str, Any] = msgspec.msgpack.decode(self._messages.pop(0))

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, number: int) -> Moment:
        message = msgspec.msgpack.decode(self._messages[number], strict=False)
        return Moment(message["frame"], message["log"], message.get("figures"))

    def __iter__(self) -> Iterator[Moment]:
        return (self[number] for number in range(len(self)))


def _unpacked(content: bytes) -> bytes:
    """As much as can be read; the end may be missing."""
    unpacker = zlib.decompressobj()
    found = bytearray()
    with contextlib.suppress(zlib.error):
        for first in range(0, len(content), 1 << 16):
            found += unpacker.decompress(content[first : first + (1 << 16)])
    return bytes(found)


def _split(content: bytes) -> Iterator[bytes]:
    at = 0
    while at + 4 <= len(content):
        end = at + 4 + int.from_bytes(content[at : at + 4], "little")
        if end > len(content):
            return
        yield content[at + 4 : end]
        at = end
