"""What watching costs: 256 streams on one engine, in turn with nobody watching and with everything on.

Everything that works by itself: metrics (scraped once a second), a record, and KV events. A page map costs only while
somebody looks at it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Row, compare
from pagedkv.config import EngineConfig
from pagedkv.engine.engine import Engine
from pagedkv.engine.params import SamplingParams
from pagedkv.monitor.kv_events import KVEvents
from pagedkv.monitor.kv_publisher import KVEventsConfig, KVPublisher
from pagedkv.monitor.metrics import metrics_text
from pagedkv.monitor.monitor import Monitor
from pagedkv.monitor.record import RecordWriter

STREAMS = 256
TOKENS = 32
ROUNDS = 3
LEFT = 0.97
"""Share of the throughput that is to be left."""


def run() -> list[Row]:
    """Output tokens per second, the best of several rounds of each, in turn; and the share of time spent watching."""
    config = EngineConfig.load(overrides={"max_seq_len": 1024, "kv_cache_config.max_memory": "256MiB"})
    engine = Engine.from_config(config)
    engine.warm_up()
    throughput(engine, None)
    alone = watched = 0.0
    shares = []
    for _ in range(ROUNDS):
        engine.watch.observer = None
        engine.paged.events.start(0)
        alone = max(alone, throughput(engine, None))
        with tempfile.TemporaryDirectory() as folder:
            everything = Everything(engine, Path(folder))
            start = time.perf_counter()
            watched = max(watched, throughput(engine, everything))
            shares.append(everything.seconds / (time.perf_counter() - start))
            everything.close()
    work = f"{STREAMS} streams of {TOKENS} tokens with metrics, record and KV events"
    share = statistics.median(shares)
    return [
        compare(work, watched, alone, "nobody watching", "tokens/s", better="higher", target=LEFT),
        Row("share of the engine's time spent watching", share, 1 - LEFT, "bound", "", None, None, share <= 1 - LEFT),
    ]


class Timed:
    """Hands on what an observer is told, and counts how long that takes."""

    def __init__(self, everything: Everything, monitor: Monitor) -> None:
        self._everything = everything
        self._monitor = monitor

    def __getattr__(self, name: str) -> Callable[[object], None]:
        def told(about: object) -> None:
            start = time.perf_counter()
            getattr(self._monitor, name)(about)
            self._everything.seconds += time.perf_counter() - start

        return told


class Everything:
    """All that can watch an engine."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.monitor = Monitor(engine)
        engine.watch.observer = Timed(self, self.monitor)
        self.seconds = 0.0
        self.publisher = KVPublisher(KVEventsConfig(endpoint=f"ipc://{folder}/events"))
        self.record = RecordWriter(self.monitor, folder / "record.pkv")
        self.monitor.listeners += [self.record, KVEvents(self.monitor, self.publisher.publish)]
        self.scraped = 0.0

    def look(self) -> None:
        """What the HTTP process asks for, as often as it does."""
        now = time.perf_counter()
        if now - self.scraped > 1.0:
            self.scraped = now
            metrics_text(self.monitor)
        self.seconds += time.perf_counter() - now

    def close(self) -> None:
        """End the record and the sockets; nothing may have failed on the way."""
        if len(self.monitor.listeners) != 2:
            raise AssertionError("a watcher has failed")
        self.record.close()
        self.publisher.close()


def throughput(engine: Engine, watcher: Everything | None) -> float:
    """Output tokens per second of one round; its prompts are new each time."""
    start = time.perf_counter()
    for number in range(STREAMS):
        text = f"Stream number {number} of {start} tells a story about"
        engine.add_request(text, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        if watcher is not None:
            watcher.look()
    return STREAMS * TOKENS / (time.perf_counter() - start)
