"""What watching costs: 256 streams on one engine, in turn with nobody watching and with everything on.

Everything: metrics (scraped once a second), a record, KV events, and a page map that is looked at ten times a second.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.report import Row, compare
from pagedkv.config import EngineConfig
from pagedkv.engine.engine import Engine
from pagedkv.engine.params import SamplingParams
from pagedkv.monitor.frames import Frames
from pagedkv.monitor.kv_events import KVEvents
from pagedkv.monitor.kv_publisher import KVEventsConfig, KVPublisher
from pagedkv.monitor.metrics import metrics_text
from pagedkv.monitor.monitor import Monitor
from pagedkv.monitor.record import RecordWriter

STREAMS = 256
TOKENS = 32
ROUNDS = 4
LEFT = 0.97
"""Share of the throughput that is to be left."""


def run() -> list[Row]:
    """Output tokens per second, the best of several rounds of each, in turn."""
    config = EngineConfig.load(overrides={"max_seq_len": 1024, "kv_cache_config.max_memory": "256MiB"})
    engine = Engine.from_config(config)
    engine.warm_up()
    throughput(engine, None)
    alone = watched = 0.0
    for _ in range(ROUNDS):
        engine.watch.observer = None
        engine.paged.events.start(0)
        alone = max(alone, throughput(engine, None))
        with tempfile.TemporaryDirectory() as folder:
            everything = Everything(engine, Path(folder))
            watched = max(watched, throughput(engine, everything))
            everything.close()
    work = f"{STREAMS} streams of {TOKENS} tokens with metrics, record, KV events and page map"
    return [compare(work, watched, alone, "nobody watching", "tokens/s", better="higher", target=LEFT)]


class Everything:
    """All that can watch an engine."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        engine.watch.observer = self.monitor = Monitor(engine)
        self.publisher = KVPublisher(KVEventsConfig(endpoint=f"ipc://{folder}/events"))
        self.record = RecordWriter(self.monitor, folder / "record.pkv")
        self.frames = Frames(self.monitor, every_token=True)
        self.monitor.listeners += [self.record, KVEvents(self.monitor, self.publisher.publish), self.frames]
        self.scraped = self.looked = 0.0

    def look(self) -> None:
        """What the HTTP process asks for, as often as it does."""
        now = time.monotonic()
        if now - self.looked > 0.1:
            self.looked = now
            self.frames.take(self.monitor.refresh())
        if now - self.scraped > 1.0:
            self.scraped = now
            metrics_text(self.monitor)

    def close(self) -> None:
        """End the record and the sockets; nothing may have failed on the way."""
        if len(self.monitor.listeners) != 3:
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
