"""What an engine tells whoever watches it. Watchers read; whatever they raise is theirs and stops nothing."""

from __future__ import annotations

import sys
from typing import Protocol

from pagedkv.engine.request import Request
from pagedkv.engine.step import Step


class Observer(Protocol):
    """Told what happens, in the engine's thread, between the parts of a step."""

    def queued(self, request: Request) -> None:
        """A request waits for the first time, or an answer branches off one that runs."""
        ...

    def scheduled(self, step: Step) -> None:
        """Pages have been given to this step's requests; nothing has been computed yet."""
        ...

    def stepped(self, step: Step) -> None:
        """The step's tokens have been computed; answers that ended with it have been told as `ended` already."""
        ...

    def ended(self, request: Request) -> None:
        """An answer has ended, and its pages have been given back."""
        ...


class Guard:
    """Stands between an engine and its observer: the first exception is reported, and ends the observing only."""

    def __init__(self) -> None:
        self.observer: Observer | None = None

    def tell(self, what: str, about: Request | Step) -> None:
        """Call the observer's method of this name."""
        if self.observer is None:
            return
        try:
            getattr(self.observer, what)(about)
        except Exception as error:
            self.observer = None
            print(f"monitoring has ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
