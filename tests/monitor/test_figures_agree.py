"""Metrics, frames, snapshot, KV events and audit say the same after every step of any workload."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monitor_support import greedy, watched
from prometheus_client.parser import text_string_to_metric_families

from pagedkv.cache import audit
from pagedkv.errors import PagedKVError
from pagedkv.monitor.frames import Frames
from pagedkv.monitor.kv_events import KVEvents, KVMirror
from pagedkv.monitor.metrics import metrics_text
from pagedkv.monitor.picture import Picture

TEXTS = ["a" * 40, "a" * 33 + "b" * 20, "c" * 17, "d" * 64, "a" * 40 + "e"]


class World:
    """An engine, and everybody who watches it: each must know what the manager knows."""

    def __init__(self, partial_reuse: bool) -> None:
        self.engine, self.monitor, self.clock = watched(
            12, partial_reuse=partial_reuse, max_num_tokens=24, max_batch_size=4
        )
        self.frames = Frames(self.monitor, every_token=True)
        self.batches: list[tuple[int, list]] = []
        self.events = KVEvents(self.monitor, lambda number, now, events: self.batches.append((number, events)))
        self.monitor.listeners += [self.frames, self.events]
        self.picture = Picture()
        self.mirror = KVMirror(self.events.snapshot())
        self.counts: dict[str, float] = {}

    def check(self) -> None:
        manager = self.engine.paged
        now = self.monitor.refresh()
        self.picture.apply(self.frames.take(now))
        snapshot = manager.snapshot()
        self.check_picture(snapshot)
        self.check_metrics(snapshot)
        for number, events in self.batches:
            self.mirror.apply(number, events)
        self.check_mirror(self.mirror)
        self.check_mirror(KVMirror(self.events.snapshot()))
        assert audit(manager) == []

    def check_picture(self, snapshot) -> None:
        picture, manager = self.picture, self.engine.paged
        assert picture.num_pages == manager.num_pages
        shown = np.where(picture.state > 1, 2, picture.state)
        pinned = set(snapshot["pin_pages"].tolist())
        assert shown[1:].tolist() == snapshot["page_state"][1:].tolist()
        for page in range(1, manager.num_pages + 1):
            expected = 4 if page in pinned else min(int(snapshot["page_owners"][page]) + 1, 3)
            assert picture.state[page] < 2 or picture.state[page] == expected
        assert picture.parent[1:].tolist() == snapshot["page_parent"][1:].tolist()
        live = {row for row in range(manager.table.max_rows) if snapshot["row_live"][row]}
        assert set(picture.tables) == live
        for row in live:
            pages = snapshot["row_table"][row, : snapshot["row_pages"][row]]
            assert picture.tables[row].tolist() == pages.tolist()
        scheduler = self.engine.scheduler
        assert {entry["id"] for entry in picture.requests.values()} == {
            request.id for request in [*scheduler.running, *scheduler.waiting]
        }

    def check_metrics(self, snapshot) -> None:
        found = samples(metrics_text(self.monitor))
        state = snapshot["page_state"][1:].tolist()
        for name, number in (("free", 0), ("cached", 1), ("used", 2)):
            assert found["pagedkv_pool_pages", name] == state.count(number)
            assert found["pagedkv_pool_tokens", name] == 16 * state.count(number)
        assert found["pagedkv_requests_running", ""] == len(self.engine.scheduler.running)
        waits = [value for (name, _), value in found.items() if name == "pagedkv_requests_waiting"]
        assert sum(waits) == len(self.engine.scheduler.waiting)
        missed = [value for (name, _), value in found.items() if name == "pagedkv_prefix_miss_tokens_total"]
        assert (
            found["pagedkv_prefix_hit_tokens_total", ""] + sum(missed) == found["pagedkv_prefix_query_tokens_total", ""]
        )
        assert min(missed) >= 0
        for (name, label), value in found.items():
            if name.endswith(("_total", "_count", "_bucket")):
                key = f"{name}{label}"
                assert value >= self.counts.get(key, 0.0), f"{key} went down"
                self.counts[key] = value

    def check_mirror(self, mirror: KVMirror) -> None:
        index = self.engine.paged.index
        pages = [page for page in range(1, index.indexed.size) if index.indexed[page] and index.tokens[page, -1] >= 0]
        expected = {}
        for page in pages:
            parent = int(index.parent[page])
            above = int(index.key[parent]) if parent > 0 else None
            expected[int(index.key[page])] = (above, tuple(index.tokens[page].tolist()))
        assert mirror.blocks == expected


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, value of its only label) -> value."""
    return {
        (sample.name, "/".join(v for k, v in sample.labels.items() if k != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.integers(0, 4), st.integers(1, 20), st.integers(1, 2), st.sampled_from([None, "s"])
        ),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("reset"), st.sampled_from(["all", None, "s"])),
        st.tuples(st.just("resize"), st.integers(6, 20)),
        st.tuples(st.just("pin"), st.integers(0, 4)),
        st.tuples(st.just("unpin"), st.integers(0, 3)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, partial_reuse=st.booleans())
def test_everybody_who_watches_knows_what_the_manager_knows(operations, partial_reuse: bool) -> None:
    world = World(partial_reuse)
    engine, names, pins = world.engine, [], []
    world.check()
    for kind, *details in operations:
        world.clock.now += 1.0
        if kind == "add":
            text, tokens, answers, salt = details
            try:
                names.append(engine.add_request(TEXTS[text], greedy(tokens, n=answers), namespace=salt))
            except PagedKVError:
                continue
        elif kind == "step":
            for _ in range(details[0]):
                engine.step()
        elif kind == "abort" and names:
            engine.abort(names[details[0] % len(names)])
        elif kind == "reset":
            engine.paged.reset(**({} if details[0] == "all" else {"namespace": details[0]}))
        elif kind == "resize":
            engine.resize(details[0])
        elif kind == "pin":
            answer = engine.paged.pin(list(TEXTS[details[0]].encode()))
            pins += [answer] if hasattr(answer, "number") else []
        elif kind == "unpin" and pins:
            engine.paged.unpin(pins.pop(details[0] % len(pins)))
        assert engine.watch.observer is world.monitor
        assert world.frames in world.monitor.listeners
        assert world.events in world.monitor.listeners
        world.check()


def test_pages_that_moved_and_a_pool_that_is_as_large_as_before() -> None:
    """Between two looks the pool shrinks, which moves pages, and grows back."""
    world = World(partial_reuse=False)
    first = world.engine.add_request("a" * 60, greedy(20))
    world.engine.add_request("b" * 60, greedy(20))
    for _ in range(6):
        world.engine.step()
    world.check()
    world.engine.abort(first)
    world.engine.paged.reset()
    world.check()
    for size in (6, 12):
        world.engine.resize(size)
    world.check()


def test_a_mirror_that_missed_a_batch_says_so() -> None:
    with pytest.raises(ValueError, match="batch 2 follows batch 0: 1 are missing"):
        KVMirror({"sequence": 0, "events": []}).apply(2, [])
