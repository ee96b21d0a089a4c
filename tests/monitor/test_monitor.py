"""Times, reasons of misses, alarms that do not spread, and figures that need no step to be right."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from monitor_support import finish, greedy, watched
from test_figures_agree import samples

from pagedkv.engine.observer import Guard
from pagedkv.engine.request import Request
from pagedkv.monitor.histogram import Histogram
from pagedkv.monitor.iteration import iteration_stats
from pagedkv.monitor.metrics import metrics_text
from pagedkv.monitor.request_log import RequestLog


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.add([0.5, 1.0, 1.5, 7.0])
    histogram.add([])
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert (histogram.sum, histogram.count) == (10.0, 4)


def test_times_of_a_request_are_those_of_the_clock() -> None:
    engine, monitor, clock = watched(max_num_tokens=16)
    engine.add_request("x" * 20, greedy(3))
    finish(engine, clock, 1.0)  # admitted after 1 s, its prompt takes two steps, then a token per step
    timings = monitor.timings
    assert (timings.queue.sum, timings.first_token.sum, timings.in_all.sum) == (1.0, 2.0, 4.0)
    assert (timings.inter_token.count, timings.inter_token.sum) == (2, 2.0)
    assert timings.tracks == {}
    assert {reason.value: count for reason, count in timings.ended.items() if count} == {"length": 1}


def test_several_answers_are_one_prompt() -> None:
    engine, monitor, clock = watched()
    engine.add_request("x" * 20, greedy(3, n=2))
    finish(engine, clock, 1.0)
    timings = monitor.timings
    assert (timings.queue.count, timings.first_token.count, timings.in_all.count) == (1, 1, 1)
    assert sum(timings.ended.values()) == 2


@pytest.mark.parametrize(
    ("before", "prompt", "namespace", "expected"),
    [
        ([], "a" * 40, None, {"never_seen": 32, "too_short": 8}),
        ([("a" * 40, None)], "a" * 40, None, {"too_short": 8}),
        ([("a" * 40, None)], "a" * 40, "salt", {"other_namespace": 32, "too_short": 8}),
        ([("a" * 40, None)], "a" * 16 + "b" * 24, None, {"never_seen": 16, "too_short": 8}),
        ([("a" * 40, None), ("b" * 90, None), ("c" * 90, None)], "a" * 40, None, {"evicted": 32, "too_short": 8}),
        ([], "a" * 16, None, {"too_short": 16}),
    ],
)
def test_why_a_prompt_was_not_found(before, prompt: str, namespace: str | None, expected: dict[str, int]) -> None:
    engine, monitor, clock = watched(6)
    for text, name in before:
        engine.add_request(text, greedy(1), namespace=name)
        finish(engine, clock, 1.0)
    counted = dict(monitor.misses.tokens)
    engine.add_request(prompt, greedy(1), namespace=namespace)
    finish(engine, clock, 1.0)
    new = {reason: tokens - counted[reason] for reason, tokens in monitor.misses.tokens.items()}
    assert {reason: tokens for reason, tokens in new.items() if tokens} == expected


def test_a_part_of_a_page_that_was_found_is_not_missed() -> None:
    engine, monitor, clock = watched(partial_reuse=True)
    engine.add_request("a" * 40, greedy(1))
    finish(engine, clock)
    before = dict(monitor.misses.tokens)
    engine.add_request("a" * 40 + "e", greedy(1))  # two pages, and 8 tokens of the last one
    finish(engine, clock)
    assert engine.scheduler.cached_tokens == 40
    assert monitor.misses.tokens == before | {"too_short": before["too_short"] + 1}


def test_an_answer_counts_as_seen() -> None:
    """The next turn of a chat begins with the last one's answer."""
    engine, monitor, clock = watched(6)
    engine.add_request("a" * 16, greedy(33))
    finish(engine, clock)
    answer = engine.paged.index.tokens[engine.paged.index.indexed].tolist()[1:]
    for text in ("b" * 90, "c" * 90):
        engine.add_request(text, greedy(1))
        finish(engine, clock)
    before = monitor.misses.tokens["evicted"]
    engine.add_request([97] * 16 + answer[1] + [5], greedy(1))
    finish(engine, clock)
    assert monitor.misses.tokens["evicted"] - before == 32


def test_regret_is_the_time_from_an_eviction_until_the_page_is_wanted() -> None:
    engine, monitor, clock = watched(6)
    for text in ("a" * 40, "b" * 90):
        engine.add_request(text, greedy(1))
        finish(engine, clock)
    clock.now += 30.0
    engine.add_request("a" * 40, greedy(1))
    finish(engine, clock)
    assert (monitor.misses.regret.count, monitor.misses.regret.sum) == (2, 60.0)


def test_gauges_are_right_without_a_step() -> None:
    """FAILURES 60: all requests are cancelled, and no step runs after it."""
    engine, monitor, _ = watched()
    names = [engine.add_request(letter * 20, greedy(9)) for letter in "abc"]
    engine.step()
    assert samples(metrics_text(monitor))["pagedkv_requests_running", ""] == 3
    for name in names:
        engine.abort(name)
    found = samples(metrics_text(monitor))
    for name in ("pagedkv_requests_running", "vllm:num_requests_running", "vllm:num_requests_waiting"):
        assert found[name, ""] == 0
    assert (found["pagedkv_pool_pages", "used"], found["vllm:kv_cache_usage_perc", ""]) == (0, 0)


def test_pages_read_again_after_a_preemption_are_no_hits() -> None:
    """FAILURES 59: distinct prompts that preempt each other have no hits; what came back is counted on its own."""
    engine, monitor, _ = watched(7)
    for number in range(4):
        engine.add_request([number] * 20, greedy(40))
    finish(engine)
    found = samples(metrics_text(monitor))
    assert found["pagedkv_preemptions_total", ""] > 0
    assert found["pagedkv_prefix_hit_tokens_total", ""] == 0
    assert found["pagedkv_preempted_tokens_total", ""] >= found["pagedkv_recovered_tokens_total", ""] > 0


def test_a_warm_prompt_is_asked_for_once() -> None:
    """FAILURES 67: decode steps do not count again."""
    engine, monitor, _ = watched()
    for _ in range(2):
        engine.add_request("a" * 33, greedy(10))
        finish(engine)
    found = samples(metrics_text(monitor))
    assert found["vllm:prefix_cache_queries_total", ""] == 66
    assert found["vllm:prefix_cache_hits_total", ""] == 32


class Broken:
    """A listener whose every method fails."""

    def pages(self, *_: object, **__: object) -> None:
        raise RuntimeError("disk full")

    happened = step_over = pages


def test_a_listener_that_fails_is_told_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    """FAILURES 66: a sink that throws never stops serving, nor the metrics."""
    engine, monitor, _ = watched()
    monitor.listeners.append(Broken())
    engine.add_request("abc", greedy(3))
    finish(engine)
    assert monitor.listeners == []
    assert "Broken has ended: RuntimeError: disk full" in capsys.readouterr().err
    assert samples(metrics_text(monitor))["pagedkv_requests_ended_total", "length"] == 1


def test_an_observer_that_fails_ends_the_observing_only(capsys: pytest.CaptureFixture[str]) -> None:
    """FAILURES 66."""
    engine, _, _ = watched()
    engine.watch.observer = Broken()  # type: ignore[assignment]
    name = engine.add_request("abc", greedy(3))
    results = []
    while engine.has_unfinished:
        results += [piece.result for piece in engine.step() if piece.result]
    assert results[0].request_id == name
    assert "monitoring has ended: AttributeError" in capsys.readouterr().err
    guard = Guard()
    guard.tell("queued", Request("x", None))  # type: ignore[arg-type]


def test_requests_relate_as_they_must() -> None:
    """FAILURES 66: prompt >= cached >= 0 for each request, whatever became of it."""
    engine, monitor, _ = watched(7)
    stream = StringIO()
    monitor.listeners.append(RequestLog(16, stream))
    names = [engine.add_request("a" * (17 + number), greedy(30)) for number in range(5)]
    for _ in range(8):
        engine.step()
    engine.abort(names[0])
    finish(engine)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["request"] for line in lines if line["reason"] == "abort"] == [names[0]]
    assert len(lines) == 5
    for line in lines:
        assert line["prompt"] >= line["cached"] >= 0
        assert line["in_all"] >= 0


def test_iteration_statistics_in_tensorrts_words() -> None:
    engine, monitor, _ = watched(max_num_tokens=24)
    engine.add_request("a" * 20, greedy(9))
    engine.step()
    engine.add_request("b" * 40, greedy(9))
    engine.step()
    found = iteration_stats(monitor)
    assert found["kvCacheStats"] == {
        "maxNumBlocks": 8,
        "freeNumBlocks": 3,
        "usedNumBlocks": 5,
        "tokensPerBlock": 16,
        "allocTotalBlocks": 5,
        "allocNewBlocks": 5,
        "reusedBlocks": 0,
        "missedBlocks": 3,  # 48 tokens; the 12 that fill no page are none
        "cacheHitRate": 0.0,
    }
    assert found["inflightBatchingStats"] == {
        "numScheduledRequests": 2,
        "numContextRequests": 1,
        "numGenRequests": 1,
        "numPausedRequests": 0,
        "numCtxTokens": 16,
    }
    finish(engine)


def test_tenants_are_told_apart_and_salts_are_not_shown() -> None:
    engine, monitor, _ = watched(16)
    for namespace in (("acme", None), ("acme", "s3cret"), "s3cret", None):
        engine.add_request("a" * 20, greedy(9), namespace=namespace)
    engine.step()
    text = metrics_text(monitor)
    found = samples(text)
    assert found["pagedkv_tenant_pages", "used/acme"] == 4
    assert found["pagedkv_tenant_requests", "running/"] == 2
    assert "s3cret" not in text
    finish(engine)
