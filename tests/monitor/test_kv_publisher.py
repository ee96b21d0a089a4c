"""KV events over sockets: what a subscriber sees, what it can ask for again, and what a wrong setting says."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from monitor_support import finish, greedy, watched

from pagedkv.errors import ConfigError
from pagedkv.monitor.kv_events import KVEvents, KVMirror
from pagedkv.monitor.kv_publisher import KVEventsConfig, KVPublisher


def free_endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def config() -> KVEventsConfig:
    return KVEventsConfig(endpoint=free_endpoint(), replay_endpoint=free_endpoint(), buffer_steps=3, topic="kv")


@pytest.fixture
def publisher(config: KVEventsConfig) -> Iterator[KVPublisher]:
    publisher = KVPublisher(config)
    yield publisher
    publisher.close()


def test_a_subscriber_mirrors_the_index(config: KVEventsConfig, publisher: KVPublisher) -> None:
    engine, monitor, _ = watched(6)
    events = KVEvents(monitor, publisher.publish)
    monitor.listeners.append(events)
    engine.add_request("a" * 40, greedy(1))
    finish(engine)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(config.endpoint)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        time.sleep(0.3)
        mirror = KVMirror(events.snapshot())
        for text in ("b" * 90, "a" * 40):  # the first evicts what was there
            engine.add_request(text, greedy(1), namespace="salt")
            finish(engine)
        while mirror.sequence < events.sequence:
            assert subscriber.poll(5000)
            topic, number, payload = subscriber.recv_multipart()
            assert topic == b"kv"
            stamp, batch, rank = msgspec.msgpack.decode(payload)
            assert abs(stamp - time.time()) < 60
            assert rank == 0
            assert all(set(event) >= {"type"} for event in batch)
            mirror.apply(int.from_bytes(number, "big"), batch)
    assert mirror.blocks == KVMirror(events.snapshot()).blocks
    stored = [event for event in events.snapshot()["events"] if event["parent_block_hash"] is None]
    assert {tuple(event["extra_keys"][0] or ()) if event["extra_keys"] else () for event in stored} >= {("salt",)}


def test_batches_can_be_had_again(config: KVEventsConfig, publisher: KVPublisher) -> None:
    """As vLLM's: from a number on, as many as are kept, ended by -1."""
    for number in range(5):
        publisher.publish(number, 1.5, [{"type": "AllBlocksCleared"}])
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.connect(config.replay_endpoint or "")
        time.sleep(0.5)
        asker.send_multipart([b"", (3).to_bytes(8, "big")])
        numbers = []
        while not numbers or numbers[-1] != -1:
            assert asker.poll(5000)
            _, number, payload = asker.recv_multipart()
            numbers.append(int.from_bytes(number, "big", signed=True))
            if numbers[-1] >= 0:
                assert msgspec.msgpack.decode(payload) == [1.5, [{"type": "AllBlocksCleared"}], 0]
        assert numbers == [3, 4, -1]
        asker.send_multipart([b"", b"nonsense and more"])
        asker.send_multipart([b"", (0).to_bytes(8, "big")])
        first = int.from_bytes(asker.recv_multipart()[1], "big")
        assert first == 2  # the oldest of the three that are kept


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "kv_events_config: "),
        ('{"endpont": "tcp://*:1"}', "contains unknown field `endpont`"),
        ('{"publisher": "kafka"}', "Invalid enum value 'kafka'"),
        ('{"buffer_steps": "many"}', "Expected `int`"),
    ],
)
def test_wrong_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_config") as refused:
        KVEventsConfig.of(text)
    assert message in str(refused.value)


def test_an_endpoint_in_use_is_refused(config: KVEventsConfig, publisher: KVPublisher) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        KVPublisher(config)


def test_events_that_are_off_publish_nothing() -> None:
    assert not KVEventsConfig.of('{"enable_kv_cache_events": false}').on
    assert not KVEventsConfig.of('{"publisher": "null"}').on
    assert KVEventsConfig.of({}).on
