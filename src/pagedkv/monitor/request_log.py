"""One line of JSON per answer that has ended: who, how much, how long, and why."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

from pagedkv.engine.request import Request
from pagedkv.monitor.monitor import Listener
from pagedkv.monitor.record import ending


class RequestLog(Listener):
    """Writes the lines. A listener of the monitor.

    Args:
        stream: where to; the standard error stream if not given.
    """

    def __init__(self, page_size: int, stream: TextIO | None = None) -> None:
        self._page_size = page_size
        self._stream = stream or sys.stderr

    def happened(self, request: Request, what: str, now: float, **details: Any) -> None:
        """See `Listener`."""
        if what == "ended":
            pages = -(-request.computed // self._page_size)
            line = {"time": time.time(), "request": request.id, "answer": request.index, "pages": pages}
            print(json.dumps(line | ending(request, details["track"], now)), file=self._stream, flush=True)
