"""Watchers: the listeners that the engine's process is told to have: a record, KV events, a log, spans."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pagedkv.errors import ConfigError, InvalidRequestError
from pagedkv.monitor.kv_events import KVEvents
from pagedkv.monitor.kv_publisher import KVEventsConfig, KVPublisher
from pagedkv.monitor.monitor import Monitor
from pagedkv.monitor.record import RecordWriter
from pagedkv.monitor.request_log import RequestLog
from pagedkv.monitor.tracing import tracing
from pagedkv.serve.messages import Duties


class Watchers:
    """Starts them, and ends them.

    Raises:
        ConfigError: a file cannot be written, or an endpoint cannot be used.
    """

    def __init__(self, monitor: Monitor, duties: Duties) -> None:
        self._record: RecordWriter | None = None
        self._publisher: KVPublisher | None = None
        self._events: KVEvents | None = None
        self._monitor = monitor
        if duties.record is not None:
            self._record = _record(monitor, Path(duties.record))
            monitor.listeners.append(self._record)
        config = KVEventsConfig.of(duties.kv_events or {"enable_kv_cache_events": False})
        if config.on:
            self._publisher = KVPublisher(config)
            self._events = KVEvents(monitor, self._publisher.publish)
            monitor.listeners.append(self._events)
        if duties.log_requests:
            monitor.listeners.append(RequestLog(monitor.engine.paged.page_size))
        spans = tracing(monitor.engine.model.name, monitor.clock(), os.environ)
        if spans is not None:
            monitor.listeners.append(spans)

    def kv_snapshot(self) -> dict[str, Any]:
        """All blocks of the index, and the number of the last batch that was published.

        Raises:
            InvalidRequestError: KV events are not published.
        """
        if self._events is None:
            raise InvalidRequestError("KV events are not published here; --kv-events-config turns them on")
        self._monitor.refresh()
        return self._events.snapshot()

    def close(self) -> None:
        """End them; what was recorded is in its file then."""
        if self._record is not None and self._record in self._monitor.listeners:
            self._record.close()
        if self._publisher is not None:
            self._publisher.close()


def _record(monitor: Monitor, path: Path) -> RecordWriter:
    """A record in this file; in path-2, path-3 ... if there are records already, so that none is lost."""
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    try:
        writer = RecordWriter(monitor, free)
    except OSError as error:
        raise ConfigError(f"--record {free}: {error.strerror}") from None
    print(f"recording to {free}", file=sys.stderr, flush=True)
    return writer
