"""Limits while the engine runs: floors and ceilings of namespaces, tokens of the queue, and a pool that is resized."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from fake_model import FakeModel, expected_text
from schedule_driver import Driver, expected_output
from test_engine import drain, greedy, make_engine

from pagedkv.attention.cpu.backend import CpuBackend
from pagedkv.cache import NO_COPIES, check
from pagedkv.errors import ConfigError, InvalidRequestError, NeverFitsError, QueueFullError
from pagedkv.spec import LayerSpec, ModelSpec
from pagedkv.store.pages import PageStore


def limited(pages: int = 8, watermark: float = 0.0, **limits: tuple[int, int | None]) -> Driver:
    driver = Driver(pages, scheduler={"watermark": watermark})
    for namespace, (floor, ceiling) in limits.items():
        driver.manager.set_limits(namespace, floor=floor, ceiling=ceiling)
    return driver


def test_a_namespace_at_its_ceiling_does_not_block_others() -> None:
    driver = limited(a=(0, 2))
    first, second = driver.submit("1", 7, 2, namespace="a"), driver.submit("2", 7, 2, namespace="a")
    other = driver.submit("3", 7, 2, namespace="b")
    assert driver.step().requests == [first, other]
    driver.run()
    assert [r.sampled for r in (first, second, other)] == [expected_output(r) for r in (first, second, other)]


def test_what_a_ceiling_can_never_hold_is_refused_at_once() -> None:
    driver = limited(a=(0, 2), b=(3, None))
    with pytest.raises(NeverFitsError, match="need 3 pages of 4 tokens; its namespace may use 2 of 8"):
        driver.submit("x", 8, 4, namespace="a")
    with pytest.raises(NeverFitsError, match="need 6 pages of 4 tokens; its namespace may use 5 of 8"):
        driver.submit("x", 20, 4)
    driver.submit("x", 20, 4, namespace="b")
    driver.run()


def test_a_namespace_that_outgrows_its_ceiling_preempts_its_own_only() -> None:
    driver = limited(10, a=(0, 4))
    own = [driver.submit(name, 4, 9, namespace="a") for name in "12"]
    other = driver.submit("3", 4, 9)
    driver.run()
    assert own[1].preemptions >= 1
    assert own[0].preemptions == other.preemptions == 0
    assert all(r.sampled == expected_output(r) for r in (*own, other))


def test_a_floor_is_there_below_the_watermark() -> None:
    driver = limited(watermark=0.2, a=(3, None))
    other = driver.submit("o", 17, 3)  # all five pages that are not a's, and it takes no more
    driver.step()
    own = driver.submit("1", 12, 1, namespace="a")
    driver.step()
    assert own.sampled
    driver.run()
    assert other.sampled == expected_output(other)


def test_a_floor_is_there_whoever_else_asks() -> None:
    driver = limited(a=(3, None))
    others = [driver.submit(f"o{number}", 4, 12) for number in range(4)]
    while driver.manager.pool.available > 3:  # until the others have all that is not a's
        driver.step()
    own = driver.submit("1", 12, 1, namespace="a")
    driver.step()
    assert own.sampled  # it waited for nobody
    driver.run()
    assert all(r.sampled == expected_output(r) for r in (own, *others))


@pytest.mark.parametrize("seed", range(25))
def test_any_mix_under_limits_ends(seed: int) -> None:
    """FAILURES 37, 38: bounded steps, whatever the limits, and the same tokens as undisturbed."""
    rng = random.Random(seed)
    driver = limited(8, a=(rng.randint(0, 3), rng.randint(3, 6)), b=(rng.randint(0, 3), None), c=(0, rng.randint(2, 8)))
    requests = []
    for number in range(30):
        try:
            name = rng.choice(["a", "b", "c", None])
            prompt = list(range(rng.randint(1, 14)))
            requests.append(driver.submit(f"r{number}", prompt, rng.randint(1, 8), namespace=name))
        except NeverFitsError:
            continue
        for _ in range(rng.randint(0, 3)):
            driver.step()
    driver.run()
    assert len(requests) > 10
    assert all(r.sampled == expected_output(r) for r in requests)


def test_the_queue_is_bounded_in_tokens() -> None:
    driver = Driver(8, max_queue_tokens=10)
    driver.submit("long", 20)  # nothing waits, so it may
    driver.step()
    waiting = driver.submit("a", 6)
    with pytest.raises(QueueFullError, match=r"requests of 6 prompt tokens are waiting; 5 more would exceed .* 10"):
        driver.submit("b", 5)
    driver.submit("c", 4)
    assert driver.scheduler.waiting.prompt_tokens == 10
    driver.run()
    assert driver.scheduler.waiting.prompt_tokens == 0
    assert waiting.sampled == expected_output(waiting)


def test_a_priority_that_nobody_heeds_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="priority is 3; waiting_queue_policy is FCFS"):
        make_engine().add_request("a", priority=3)
    make_engine(scheduler_config={"waiting_queue_policy": "PRIORITY"}).add_request("a", priority=3)


# The pool at another size.

TEXT = "a prompt of more than two pages of tokens"


@pytest.mark.parametrize("target", [3, 6, 20])
def test_a_pool_is_resized_while_requests_run(target: int) -> None:
    engine = make_engine(pages=12)
    names = [engine.add_request(f"{TEXT} {number}", greedy(20)) for number in range(4)]
    for _ in range(3):
        engine.step()
    need = max(live.request.most_kv_tokens for live in engine._live.values())
    pages = engine.resize(target)
    assert pages == engine.manager.num_pages == engine.store.num_pages >= max(target, -(-need // 16))
    check(engine.manager)
    results = drain(engine)
    for number, name in enumerate(names):
        assert results[name][1].outputs[0].text == expected_text(f"{TEXT} {number}", 20)
    assert engine.resize(target) == target
    assert engine.store.layers[0].key.shape[0] == target + 1
    with pytest.raises(ConfigError, match="a pool of 0 pages"):
        engine.resize(0)
    with pytest.raises(NeverFitsError):
        engine.add_request("x" * 16 * target, greedy(2))


class ReadingModel(FakeModel):
    """Its next token depends on all keys that the pages hold, so a page that went missing shows."""

    def forward(self, tokens, positions, logit_rows, store, plan):  # type: ignore[no-untyped-def]
        layer = store.layers[0]
        key = torch.nn.functional.one_hot(tokens % 32, 32).float()[:, None]
        store.backend.write(layer, key, key, plan)
        from pagedkv.attention.interface import AttentionOptions

        query = torch.ones(len(tokens), 1, 32)
        seen = store.backend.attend(layer, query, plan, AttentionOptions(scale=1e-6))[logit_rows, 0]
        logits = torch.zeros(len(logit_rows), 257)
        logits[:, 97:123] = torch.frac(seen @ torch.arange(1.0, 33.0)[:, None] * torch.arange(1.0, 27.0) * 0.37)
        return logits


def test_pages_keep_their_content_when_they_move() -> None:
    def answers(sizes: list[int]) -> dict[str, str]:
        engine = make_engine(ReadingModel(), pages=14)
        gone = engine.add_request("z" * 50, greedy(24))  # at the pool's start, so that others have to move
        texts = {engine.add_request(f"{number} {TEXT}", greedy(24)): "" for number in range(2)}
        for _ in range(3):
            engine.step()
        engine.abort(gone)
        moved = False
        while engine.has_unfinished:
            if sizes:
                before = engine.manager.table.table.copy()
                engine.resize(sizes.pop(0))
                moved |= bool((engine.manager.table.table != before).any())
            for piece in engine.step():
                if piece.result is not None:
                    texts[piece.request_id] = piece.result.outputs[0].text
        assert moved == resized
        return texts

    resized = False
    undisturbed = answers([])
    assert len(set(undisturbed.values())) == 2
    resized = True
    assert answers([7, 30, 10]) == undisturbed


def test_a_store_keeps_what_it_keeps() -> None:
    spec = ModelSpec("s", (LayerSpec(1, 1, 32, 32), LayerSpec(2, 1, 32, 32)), 64, 10)
    store = PageStore(spec, CpuBackend(), 4, 16, torch.float32)
    for number, layer in enumerate(store.layers):
        for page in range(1, 5):
            layer.key[page], layer.value[page] = 10 * number + page, -page
    store.resize(2, np.array([[4, 1]], np.int32))
    store.resize(3, NO_COPIES)
    for number, layer in enumerate(store.layers):
        assert [float(layer.key[page].max()) for page in range(4)] == [0, 10 * number + 4, 10 * number + 2, 0]
        assert [float(layer.value[page].min()) for page in range(4)] == [0, -4, -2, 0]
    with pytest.raises(ConfigError, match="a store of 0 pages"):
        store.resize(0, NO_COPIES)


def test_a_store_that_cannot_grow_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    allocate = engine.store.backend.allocate

    def broken(layer, num_pages, *rest):  # type: ignore[no-untyped-def]
        if num_pages > 9:
            raise RuntimeError("not enough memory")
        return allocate(layer, num_pages, *rest)

    monkeypatch.setattr(engine.store.backend, "allocate", broken)
    with pytest.raises(MemoryError, match="no memory for 100 pages"):
        engine.resize(100)
    assert engine.manager.num_pages == engine.store.num_pages == 8
    name = engine.add_request("still", greedy(5))
    assert drain(engine)[name][0] == expected_text("still", 5)
