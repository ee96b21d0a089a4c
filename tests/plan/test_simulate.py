"""The simulator: the scheduler and manager that serve, in simulated time. Sums are worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.cache import KVCacheManager, check
from pagedkv.config import EngineConfig, SchedulerConfig
from pagedkv.errors import OutOfMemoryBudgetError
from pagedkv.plan.results import Result
from pagedkv.plan.simulate import Setup, Simulation, simulate
from pagedkv.plan.steptime import Fitted, Roofline, Work
from pagedkv.plan.synthetic import Synthetic, make_trace
from pagedkv.plan.traces import Trace

A_SECOND_A_STEP = Fitted((1.0, 0, 0, 0, 0, 0))
A_SECOND_A_TOKEN = Fitted((0, 1.0, 0, 0, 0, 0))


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    """(arrival, prompt, output) of requests that share nothing."""
    arrival, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    n = len(requests)
    return Trace(
        "hand-made", arrival.astype(float), prompt.astype(np.int32), output.astype(np.int32), np.arange(n + 1),
        np.arange(n), prompt.astype(np.int32), n + np.arange(n),
    )  # fmt: skip


def setup_of(pages: int, allocator: Any = "paged", page_size: int = 4, caching: bool = True, **config: Any) -> Setup:
    """A pool of so many pages, a byte for each token."""
    policy = SchedulerConfig(watermark=0.0, capacity_scheduler_policy=config.pop("policy", "MAX_UTILIZATION"))
    chosen = EngineConfig(**{"max_seq_len": 32, "max_batch_size": 8, "scheduler_config": policy, **config})
    return Setup(allocator, (pages + 1) * page_size, 1, chosen, page_size, caching)


def test_the_times_of_one_request() -> None:
    """4 tokens of prompt take a step of 4 s, each of the two other tokens one of 1 s."""
    result = simulate(trace_of((0.0, 4, 3)), setup_of(8), A_SECOND_A_TOKEN)
    assert (result.first.tolist(), result.last.tolist()) == ([4.0], [6.0])
    figures = result.figures()
    assert (figures["ttft_mean"], figures["itl_mean"], figures["seconds"]) == (4, 1, 6)
    assert figures["output_tokens_per_second"] == 0.5


def test_time_passes_until_the_next_arrival() -> None:
    result = simulate(trace_of((0.0, 4, 1), (100.0, 4, 1)), setup_of(8), A_SECOND_A_STEP)
    assert result.first.tolist() == [1.0, 101.0]
    assert result.ttft.tolist() == [1.0, 1.0]


def test_a_request_queues_for_pages() -> None:
    """Three pages; each of the requests fills two until it ends."""
    result = simulate(trace_of((0.0, 8, 1), (0.0, 8, 1)), setup_of(3), A_SECOND_A_STEP)
    assert result.queueing.tolist() == [0.0, 1.0]
    assert result.first.tolist() == [1.0, 2.0]


def test_contiguous_reservation_runs_fewer_at_once() -> None:
    """16 pages: two requests of the longest length of 8 pages, or eight of two pages each."""
    trace = trace_of(*[(0.0, 5, 3)] * 8)
    paged, contiguous = (simulate(trace, setup_of(16, kind), A_SECOND_A_STEP) for kind in ("paged", "contiguous"))
    assert (paged.running()[1], contiguous.running()[1]) == (8, 2)
    # After the first step, all rows hold 5 tokens: 8 slots each paged, 32 contiguous.
    assert paged.series["empty_slots"][0] / paged.series["used_slots"][0] == 3 / 8
    assert contiguous.series["empty_slots"][0] / contiguous.series["used_slots"][0] == 27 / 32
    assert contiguous.waste > 0.8 > 0.4 > paged.waste


def test_growing_contiguous_rooms_are_moved_and_the_copies_take_time() -> None:
    trace = trace_of((0.0, 4, 5), (0.0, 4, 5))
    setup = setup_of(8, "growing")
    copies = Fitted((1.0, 0, 0, 0, 0, 1.0))
    plain, slow = simulate(trace, setup, A_SECOND_A_STEP), simulate(trace, setup, copies)
    assert slow.copied_bytes == plain.copied_bytes > 0
    assert slow.seconds == plain.seconds + slow.copied_bytes


def test_a_conversation_finds_its_past() -> None:
    """The second turn's 17 tokens begin with the 8 + 4 of the first; its last answer token was never stored."""
    spec = Synthetic(2, turns=2, think=5000, prompt="fixed:8", output="fixed:5")
    on, off = (simulate(make_trace(spec), setup_of(16, caching=caching), A_SECOND_A_STEP) for caching in (True, False))
    assert on.cached.tolist() == [0, 12]
    assert on.figures()["hit_rate"] == pytest.approx(12 / (8 + 21))
    assert off.cached.tolist() == [0, 0]


def test_what_can_never_run_is_counted_and_the_rest_goes_on() -> None:
    result = simulate(trace_of((0.0, 30, 5), (0.0, 4, 1), (0.0, 28, 2)), setup_of(6), A_SECOND_A_STEP)
    assert result.refused == {"too long": 2, "queue full": 0}
    assert result.ended.tolist() == [False, True, False]
    assert result.figures()["completed"] == 1


def test_a_bounded_queue_refuses() -> None:
    result = simulate(trace_of(*[(0.0, 4, 1)] * 3), setup_of(8, max_queue_size=2), A_SECOND_A_STEP)
    assert result.refused["queue full"] == 1


def test_a_reservation_is_never_preempted() -> None:
    trace = trace_of(*[(0.0, 4, 12)] * 4)
    taken, reserved = (
        simulate(trace, setup_of(8, policy=policy), A_SECOND_A_STEP)
        for policy in ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT")
    )
    assert taken.preemptions > 0 == reserved.preemptions
    assert reserved.running()[1] == 2  # 15 tokens each: 4 pages


def test_a_budget_without_a_page_is_refused() -> None:
    with pytest.raises(OutOfMemoryBudgetError, match=r"4 bytes\) holds 0 pages of 4 tokens; .*8 bytes\)"):
        simulate(trace_of((0.0, 1, 1)), setup_of(0), A_SECOND_A_STEP)


def test_a_budget_without_one_reservation_is_refused() -> None:
    """32 tokens are 8 pages; paged, requests that fit run all the same."""
    trace = trace_of((0.0, 4, 2))
    with pytest.raises(
        OutOfMemoryBudgetError, match=r"holds 7 pages of 4 tokens; one request of 32 tokens needs 8 pages"
    ):
        simulate(trace, setup_of(7, "contiguous"), A_SECOND_A_STEP)
    assert simulate(trace, setup_of(7), A_SECOND_A_STEP).ended.all()
    assert simulate(trace, setup_of(7, "growing"), A_SECOND_A_STEP).ended.all()


def test_the_roofline_is_the_larger_of_reading_and_computing() -> None:
    """100 bytes/s: a decode of 2 after 9 reads 50 + 2 x 10 x 3 bytes, and 5 in each of the windowed layers."""
    roof = Roofline(
        dense_bytes=50, expert_bytes=0, expert_share=1, flops_per_token=20, token_bytes=3, window_bytes=((4, 1.0),),
        pair_flops=0, bandwidth=100, flops=1000, fixed=0.5, per_sequence=0.25,
    )  # fmt: skip
    decode = roof.seconds(Work(np.array([9, 9]), np.array([1, 1])))
    assert decode == pytest.approx(0.5 + 2 * 0.25 + (50 + 3 * 20 + 2 * 5) / 100)  # the window and the token itself
    prefill = Work(np.array([0]), np.array([100]))
    assert roof.seconds(prefill) == pytest.approx(0.75 + (50 + 300 + 100) / 100)
    assert replace(roof, flops=100).seconds(prefill) == pytest.approx(0.75 + 2000 / 100)
    assert replace(roof, flops=100, pair_flops=2).seconds(prefill) == pytest.approx(0.75 + (2000 + 2 * 5050) / 100)
    few = replace(roof, expert_bytes=1000, expert_share=0.5)
    assert few.seconds(Work(np.array([0]), np.array([1]))) == pytest.approx(0.75 + (50 + 500 + 3 + 1) / 100)


def same(one: Result, other: Result) -> bool:
    return all(np.array_equal(one.series[name], other.series[name]) for name in one.series)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    pages=st.integers(8, 24),
    allocator=st.sampled_from(["paged", "contiguous", "growing"]),
    turns=st.integers(1, 3),
    policy=st.sampled_from(["MAX_UTILIZATION", "GUARANTEED_NO_EVICT"]),
)
def test_everything_that_fits_ends_and_nothing_is_left(
    seed: int, pages: int, allocator: str, turns: int, policy: str
) -> None:
    spec = Synthetic(20, "gamma", 1.0, prompt="uniform:1:9", output="uniform:1:6", turns=turns, think=2, seed=seed)
    setup = setup_of(pages, allocator, policy=policy)
    one = Simulation(make_trace(spec), setup, A_SECOND_A_STEP)
    while one.done < 20:
        one.step()
        if isinstance(one.manager, KVCacheManager):
            check(one.manager)
    result = one.result()
    assert int(result.ended.sum()) + sum(result.refused.values()) == 20
    assert one.manager.usage().used == 0
    ended = result.ended
    assert (result.arrival[ended] <= result.admitted[ended]).all()
    assert (result.admitted[ended] < result.first[ended]).all()
    assert (result.first[ended] <= result.last[ended]).all()
    assert result.gaps.size == int((result.output[ended] - 1).sum())
    assert same(result, simulate(make_trace(spec), setup, A_SECOND_A_STEP))  # the same seed, the same run


def test_time_grows_with_the_work_of_a_step() -> None:
    """2 sequences compute 3 tokens each after 10: 6 tokens, 26 in context, and 3 x (10 + 2) pairs each."""
    work = Work(np.array([10, 10]), np.array([3, 3]), 7)
    for index, amount in enumerate((1, 6, 2, 26, 72, 7)):
        coefficients = [0.0] * 6
        coefficients[index] = 0.5
        assert Fitted(tuple(coefficients)).seconds(work) == amount / 2
