"""The sockets of the KV events: PUB for batches, ROUTER for whoever has missed some. vLLM's frames and settings."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import zmq

from pagedkv.errors import ConfigError
from pagedkv.monitor.kv_events import Event

END = (-1).to_bytes(8, "big", signed=True)


class KVEventsConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The settings of vLLM's --kv-events-config.

    Attributes:
        enable_kv_cache_events: publish at all.
        publisher: "zmq", or "null" for none.
        endpoint: where to publish.
        replay_endpoint: where batches can be had again; None for nowhere.
        buffer_steps: batches that can be.
        hwm: batches that wait for a slow subscriber before it loses some.
        max_queue_size: batches that wait for the sockets' thread.
        topic: first frame of each message.
    """

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def on(self) -> bool:
        """Is anything to be published?"""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @classmethod
    def of(cls, value: str | Mapping[str, Any]) -> KVEventsConfig:
        """The settings of a JSON text or a mapping.

        Raises:
            ConfigError: it is no such thing.
        """
        try:
            return msgspec.json.decode(value, type=cls) if isinstance(value, str) else msgspec.convert(value, cls)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise ConfigError(f"kv_events_config: {error}") from None


class KVPublisher:
    """Publishes batches from a thread of its own, so that a slow subscriber never makes a step wait.

    Raises:
        ConfigError: an endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self.config = config
        self._context = zmq.Context()
        self._pub = self._bind(zmq.PUB, config.endpoint)
        self._router = None if config.replay_endpoint is None else self._bind(zmq.ROUTER, config.replay_endpoint)
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, sequence: int, now: float, events: list[Event]) -> None:
        """Hand over one batch."""
        with contextlib.suppress(queue.Full):  # its subscribers see a gap, and begin anew
            self._queue.put_nowait((sequence, msgspec.msgpack.encode([now, events, 0])))

    def close(self) -> None:
        """Send what waits, and end."""
        self._queue.put(None)
        self._thread.join(5)
        self._context.destroy(linger=100)

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, self.config.hwm)  # holds for what is bound after it
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kv_events_config: {endpoint} cannot be used: {error}") from None
        return socket

    def _run(self) -> None:
        topic = self.config.topic.encode()
        while True:
            if self._router is not None and self._router.poll(0):
                self._replay(self._router)
            try:
                batch = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            if batch is None:
                return
            self._kept.append(batch)
            self._pub.send_multipart([topic, batch[0].to_bytes(8, "big"), batch[1]])

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Send the batches that are kept from the one that is asked for on."""
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        first = int.from_bytes(frames[2], "big")
        for sequence, payload in self._kept:
            if sequence >= first:
                router.send_multipart([frames[0], b"", sequence.to_bytes(8, "big"), payload])
        router.send_multipart([frames[0], b"", END, b""])
