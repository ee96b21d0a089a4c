"""Timings: how long requests wait, how soon they answer, and how steadily."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.engine.request import FinishReason, Request
from pagedkv.monitor.histogram import Histogram

LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(slots=True)
class Track:
    """When what happened to one answer, in seconds of the monitor's clock.

    Attributes:
        tokens: of its answer that have been counted.
        last: when the last of these came.
        pages: most pages that it has held.
        reason: why its prompt was not found in the cache as far as it was not.
        waits_on: what it waited for when it was looked at last.
    """

    queued: float
    admitted: float | None = None
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    pages: int = 0
    reason: str = ""
    waits_on: str = ""


class Timings:
    """Tracks of the answers that have not ended, and histograms of those that have got so far, in seconds.

    The time in the queue, to the first token and in all is counted once per prompt, for the first of its answers.
    """

    def __init__(self) -> None:
        self.tracks: dict[Request, Track] = {}
        self.queue = Histogram(LONG)
        self.first_token = Histogram(LONG)
        self.inter_token = Histogram(SHORT)
        self.in_all = Histogram(LONG)
        self.ended: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)

    def start(self, request: Request, now: float) -> Track:
        """An answer begins to wait."""
        track = self.tracks[request] = Track(queued=now, last=now)
        return track

    def admit(self, request: Request, now: float) -> Track | None:
        """The track of an answer that runs for the first time; None if it has done so before."""
        track = self.tracks.get(request)
        if track is None or track.admitted is not None:
            return None
        track.admitted = now
        if not request.index:
            self.queue.add([now - track.queued])
        return track

    def tokens(self, requests: list[Request], now: float) -> None:
        """Count the tokens that these answers have got since the last time."""
        intervals = []
        for request in requests:
            track, count = self.tracks.get(request), len(request.sampled)
            if track is None or count == track.tokens:
                continue
            if track.first is None:
                track.first = now
                if not request.index:
                    self.first_token.add([now - track.queued])
            else:
                intervals.append((now - track.last) / (count - track.tokens))
            track.tokens, track.last = count, now
        self.inter_token.add(intervals)

    def end(self, request: Request, now: float) -> Track | None:
        """An answer has ended; returns its track, if it had one."""
        self.tokens([request], now)
        track = self.tracks.pop(request, None)
        if request.finish_reason is not None:
            self.ended[request.finish_reason] += 1
        if track is not None and not request.index:
            self.in_all.add([now - track.queued])
        return track
