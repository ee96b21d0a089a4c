"""Scheduler: batching, chunking, admission, preemption, fairness. Pools are tiny; the model is a function of tokens."""

from __future__ import annotations

import random

import pytest
from schedule_driver import Driver, expected_output

from pagedkv.cache import ContiguousManager, GrowingContiguousManager, KVCacheManager
from pagedkv.engine.request import FinishReason, Status
from pagedkv.engine.waiting import WaitingQueue
from pagedkv.errors import InvalidRequestError, NeverFitsError, QueueFullError


def done(*requests):
    return [r.sampled == expected_output(r) and r.finish_reason is FinishReason.LENGTH for r in requests]


class TestBatching:
    def test_a_prompt_within_the_budget_is_computed_in_one_step_and_yields_a_token(self):
        driver = Driver(8)
        a = driver.submit("a", 5, max_tokens=2)
        step = driver.step()
        assert (step.counts.tolist(), step.samples.tolist(), len(a.sampled)) == ([5], [True], 1)

    def test_decodes_come_first_and_prompts_take_the_rest_of_the_step(self):
        driver = Driver(20, max_num_tokens=8)
        a = driver.submit("a", 3)
        driver.step()
        b = driver.submit("b", 20)
        step = driver.step()
        assert step.requests == [a, b]
        assert step.counts.tolist() == [1, 4]  # 7 are left, and a chunk ends with a page

    def test_every_chunk_but_the_last_ends_with_a_page(self):
        driver = Driver(20, max_num_tokens=10)
        a = driver.submit("a", 21)
        chunks = [driver.step().counts.tolist() for _ in range(3)]
        assert chunks == [[8], [8], [5]]
        assert len(a.sampled) == 1

    def test_no_more_than_max_batch_size_run(self):
        driver = Driver(20, max_batch_size=2)
        for name in "abc":
            driver.submit(name, 2)
        driver.step()
        assert (len(driver.scheduler.running), len(driver.scheduler.waiting)) == (2, 1)

    def test_more_decodes_than_the_budget_take_turns(self):
        driver = Driver(40, max_num_tokens=3)
        requests = [driver.submit(name, 2, max_tokens=5) for name in "abcdef"]
        driver.run()
        assert all(done(*requests))

    def test_a_step_carries_the_copies_of_a_decode_that_moves(self):
        driver = Driver(8, manager=GrowingContiguousManager(8, 4, max_rows=4, max_seq_len=32))
        a, b = driver.submit("a", 4, max_tokens=6), driver.submit("b", 4, max_tokens=6)
        driver.step()
        assert driver.step().copies.tolist() == [[1, 3], [2, 1]]  # a makes room for b, where it was before
        driver.run()
        assert all(done(a, b))

    def test_a_request_alone_in_a_contiguous_pool_uses_all_of_it(self):
        driver = Driver(4, manager=GrowingContiguousManager(4, 4, max_rows=4, max_seq_len=16))
        a, b = driver.submit("a", 3, max_tokens=1), driver.submit("b", 9, max_tokens=7)
        driver.run()
        assert all(done(a, b))

    def test_all_run_on_contiguous_reservations_too(self):
        manager = ContiguousManager(8, 4, max_rows=4, max_seq_len=16)
        driver = Driver(8, manager=manager)
        requests = [driver.submit(name, 3) for name in "abcd"]
        driver.step()
        assert len(driver.scheduler.running) == 2  # two reservations of 4 pages fill the pool
        driver.run()
        assert all(done(*requests))
        assert manager.usage().free == 8


class TestSubmission:
    def test_an_empty_prompt_is_refused(self):
        with pytest.raises(InvalidRequestError, match="'a' is empty"):
            Driver(4).submit("a", [])

    @pytest.mark.parametrize(("prompt", "max_tokens"), [(17, 1), (14, 4)])
    def test_failure_37_and_38_what_the_pool_can_never_hold_is_refused_at_once_with_the_numbers(
        self, prompt, max_tokens
    ):
        """Failures 37 (vllm-project/vllm#39734) and 38 (vllm-project/vllm#52530): never is not the same as not now."""
        driver = Driver(4)
        b = driver.request("b", 4)
        with pytest.raises(NeverFitsError, match="need 5 pages of 4 tokens; the whole pool has 4"):
            driver.submit("a", prompt, max_tokens)
        driver.scheduler.submit(b)
        driver.run()
        assert done(b) == [True]

    def test_failure_38_what_just_fits_runs_to_its_end_alone(self):
        """Failure 38 (vllm-project/vllm#52530): at the capacity wall nothing restarts."""
        driver = Driver(4)
        a = driver.submit("a", 14, max_tokens=3)  # 16 KV entries
        driver.run()
        assert (done(a), a.preemptions) == ([True], 0)

    def test_prompt_and_answer_must_fit_max_seq_len(self):
        driver = Driver(100, max_seq_len=16)
        driver.submit("a", 12, max_tokens=4)
        with pytest.raises(NeverFitsError, match=r"13 prompt tokens \+ max_tokens 4 = 17 tokens; max_seq_len is 16"):
            driver.submit("b", 13, max_tokens=4)

    def test_the_queue_is_bounded(self):
        driver = Driver(4, max_queue_size=2)
        driver.submit("a", 1)
        driver.submit("b", 1)
        with pytest.raises(QueueFullError, match="max_queue_size is 2"):
            driver.submit("c", 1)


class TestAdmission:
    def test_a_prompt_gets_all_its_pages_at_admission_or_waits(self):
        driver = Driver(4, max_num_tokens=4)
        a = driver.submit("a", 8, max_tokens=1)
        b = driver.submit("b", 12, max_tokens=1)
        driver.step()
        assert (a.status, b.status) == (Status.RUNNING, Status.WAITING)
        driver.run()
        assert all(done(a, b))

    def test_the_watermark_is_kept_while_others_run_but_not_for_the_only_one(self):
        driver = Driver(4, scheduler={"watermark": 0.5})
        a = driver.submit("a", 12, max_tokens=1)
        b = driver.submit("b", 4, max_tokens=1)
        driver.step()
        assert (len(a.sampled), b.status) == (1, Status.WAITING)
        driver.run()
        assert all(done(a, b))

    def test_guaranteed_no_evict_sets_aside_prompt_and_answer(self):
        driver = Driver(4, scheduler={"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"})
        a = driver.submit("a", 4, max_tokens=9)  # 12 KV entries, 3 pages
        b = driver.submit("b", 4, max_tokens=5)  # 2 pages
        driver.step()
        assert (a.status, b.status) == (Status.RUNNING, Status.WAITING)
        driver.run()
        assert all(done(a, b))
        assert driver.scheduler.preemptions == 0

    def test_a_burst_of_equal_prompts_computes_its_prefix_once(self):
        driver = Driver(40, max_num_tokens=8)
        prompt = list(range(13))
        requests = [driver.submit(name, prompt, max_tokens=2) for name in "abcde"]
        driver.run()
        assert all(done(*requests))
        assert [r.cached_tokens for r in requests] == [0, 12, 12, 12, 12]

    def test_one_with_another_prompt_passes_those_that_wait_for_a_prefix(self):
        driver = Driver(40, max_num_tokens=12)
        shared = list(range(13))
        a, b = driver.submit("a", shared), driver.submit("b", shared)
        c = driver.submit("c", 2)
        step = driver.step()
        assert step.requests == [a]  # the step is full
        step = driver.step()
        assert c in step.requests
        driver.run()
        assert all(done(a, b, c))

    def test_a_waiting_prefix_is_released_when_its_writer_is_aborted(self):
        driver = Driver(40, max_num_tokens=8)
        prompt = list(range(21))
        a, b = driver.submit("a", prompt), driver.submit("b", prompt)
        driver.step()
        driver.scheduler.finish(a, FinishReason.ABORT)
        driver.run()
        assert done(b) == [True]
        assert b.cached_tokens == 8


class TestPreemption:
    def test_the_cheapest_that_suffices_goes_and_everyone_finishes(self):
        driver = Driver(6)
        old, dear, cheap = driver.submit("old", 8, 8), driver.submit("dear", 8, 8), driver.submit("cheap", 4, 8)
        driver.step()  # 2 + 2 + 1 pages, 1 free
        step = driver.step()
        assert step.preempted == [cheap]
        driver.run()
        assert all(done(old, dear, cheap))
        assert dear.preemptions + old.preemptions <= 1

    def test_a_preempted_request_samples_nothing_twice_and_resumes_from_its_cached_pages(self):
        driver = Driver(5)
        a, b = driver.submit("a", 8, 8), driver.submit("b", 8, 8)
        driver.run()
        assert all(done(a, b))
        assert driver.scheduler.preemptions >= 1

    def test_a_request_is_preempted_at_most_max_preemptions_times(self):
        driver = Driver(7, scheduler={"max_preemptions": 1})
        requests = [driver.submit(f"r{i}", 3, max_tokens=18) for i in range(8)]
        driver.run()
        assert all(done(*requests))
        assert max(r.preemptions for r in requests) == 1

    def test_two_that_share_every_page_do_not_stop_each_other(self):
        """Nobody has a private page, and yet one must give way."""
        driver = Driver(5)
        prompt = list(range(8))
        requests = [driver.submit(name, prompt, max_tokens=9) for name in "ab"]
        driver.run()
        assert all(done(*requests))

    def test_failure_40_two_that_fill_the_pool_and_need_one_page_each_both_finish(self):
        """Failure 40 (vllm-project/vllm#57104)."""
        driver = Driver(7)
        a, b = driver.submit("a", 16, 5), driver.submit("b", 12, 5)
        driver.run()
        assert all(done(a, b))

    def test_failure_42_who_is_preempted_does_not_come_back_in_the_same_step(self):
        """Failure 42 (EricLBuehler/mistral.rs#2043)."""
        driver = Driver(4)
        a, b = driver.submit("a", 7, 8), driver.submit("b", 7, 8)
        while not driver.scheduler.preemptions:
            step = driver.step()
        assert step.preempted == [b]
        assert b not in step.requests
        driver.run()
        assert all(done(a, b))

    def test_the_oldest_goes_on_even_where_it_would_be_the_cheapest_victim(self):
        driver = Driver(3)
        old, young = driver.submit("old", 4, 8), driver.submit("young", 8, 4)
        driver.step()
        assert driver.step().preempted == [young]
        driver.run()
        assert all(done(old, young))

    def test_among_those_that_share_all_their_pages_with_each_other_the_latest_gives_way(self):
        driver = Driver(8)
        driver.submit("a", 4, 8)
        shared = [driver.submit(name, [1, 2, 3, 4], 8) for name in "bc"]
        driver.step()
        assert driver.manager.private_pages([r.row for r in shared]).tolist() == [0, 0]
        assert driver.scheduler._victims(1, [], driver.scheduler.running) == shared[1:]

    def test_failure_48_the_queue_puts_the_preempted_before_those_that_never_started(self):
        """Failure 48 (vllm-project/vllm#41951): stated order, preempted first among equals."""
        make = Driver(4).request
        never_started, preempted, urgent = make("n", 1), make("p", 1), make("u", 1, priority=-1)
        for arrival, request in enumerate((never_started, preempted, urgent)):
            request.arrival = arrival
        preempted.preemptions = 1
        for by_priority, expected in (
            (False, [preempted, never_started, urgent]),
            (True, [urgent, preempted, never_started]),
        ):
            queue = WaitingQueue(by_priority)
            for request in (never_started, urgent, preempted):
                queue.add(request)
            assert list(queue) == expected
            queue.remove(preempted)
            assert list(queue) == [request for request in expected if request is not preempted]

    def test_failure_48_the_preempted_comes_back_before_the_waiting(self):
        """Failure 48 (vllm-project/vllm#41951), end to end."""
        driver = Driver(4, max_batch_size=2)
        a, b = driver.submit("a", 7, 8), driver.submit("b", 7, 8)
        c = driver.submit("c", 1, 1)
        while not driver.scheduler.preemptions:
            driver.step()
        assert next(iter(driver.scheduler.waiting)) is b
        driver.run()
        assert all(done(a, b, c))

    def test_failure_50_a_victim_is_not_in_the_plan_and_the_others_get_their_token(self):
        """Failure 50 (vllm-project/vllm#23347): under priority the worst goes, though others are cheaper."""
        driver = Driver(5, scheduler={"waiting_queue_policy": "PRIORITY"})
        b, c = driver.submit("b", 4, 6, priority=0), driver.submit("c", 3, 6, priority=0)
        a = driver.submit("a", 11, 6, priority=9)
        driver.step()
        step = driver.step()
        assert step.preempted == [a]
        assert set(step.requests) == {b, c}
        driver.run()
        assert all(done(a, b, c))

    def test_failure_54_the_page_is_drawn_exactly_when_its_first_token_is_about_to_be_written(self):
        """Failure 54 (GeeeekExplorer/nano-vllm#71): prompts of 3, 4 and 5 tokens, page by page."""
        for prompt in (3, 4, 5):
            driver = Driver(3)
            driver.submit("a", prompt, max_tokens=6)
            for stored in range(prompt, prompt + 6):
                driver.step()
                if stored < prompt + 5:
                    assert driver.manager.usage().used == -(-stored // 4)

    def test_failure_59_reading_ones_own_pages_again_is_no_hit(self):
        """Failure 59 (vllm-project/vllm#25780)."""
        driver = Driver(8)
        for i in range(6):
            driver.submit(f"r{i}", 7, max_tokens=12)
        driver.run()
        assert driver.scheduler.preemptions > 0
        assert driver.scheduler.cached_tokens == 0

    def test_failure_67_hits_are_counted_once(self):
        """Failure 67 (kvcache-ai/Mooncake#1160): 10 decode steps do not add to a warm prompt's 8 hits."""
        driver = Driver(20)
        driver.submit("a", list(range(9)), max_tokens=1)
        driver.run()
        queries, hits = driver.scheduler.prompt_tokens, driver.scheduler.cached_tokens
        driver.submit("b", list(range(9)), max_tokens=10)
        driver.run()
        assert (driver.scheduler.prompt_tokens - queries, driver.scheduler.cached_tokens - hits) == (9, 8)


class TestFairness:
    def test_failure_44_a_chunk_shorter_than_a_page_is_computed_rather_than_none(self):
        """Failure 44 (vllm-project/vllm#45414): five endless decodes leave 3 tokens of a step of 8."""
        driver = Driver(100, max_num_tokens=8)
        for i in range(5):
            driver.submit(f"d{i}", 1, max_tokens=50)
        driver.step()
        a = driver.submit("a", 11)
        assert driver.step().counts.tolist() == [1, 1, 1, 1, 4]  # a page's worth is kept for prompts
        assert a.computed == 4
        driver.scheduler.config = driver.scheduler.config.model_copy(update={"max_num_tokens": 3})
        driver.step()
        assert a.computed == 5  # one token: less than a page, but more than nothing

    def test_failure_46_decodes_go_on_while_prompts_keep_arriving(self):
        """Failure 46 (sgl-project/sglang#32549): 100 prompts of one full chunk each, one per step."""
        driver = Driver(400, max_num_tokens=16)
        a = driver.submit("a", 4, max_tokens=150)
        driver.step()
        for i in range(100):
            driver.submit(f"p{i}", 16, max_tokens=1)
            driver.step()
        assert len(a.sampled) >= 100

    def test_failure_47_a_prompt_gets_its_chunks_while_decodes_fill_the_step(self):
        """Failure 47 (lablup/mlxcel#1011): four endless decodes, a budget of four, and a prompt of five pages."""
        driver = Driver(100, max_num_tokens=4)
        for i in range(4):
            driver.submit(f"d{i}", 1, max_tokens=200)
        for _ in range(4):
            driver.step()
        c = driver.submit("c", 20)
        for _ in range(10):
            before = c.computed
            driver.step()
            assert c.computed > before
        assert len(c.sampled) == 1

    def test_smaller_priorities_go_first_under_that_policy(self):
        driver = Driver(20, max_batch_size=1, scheduler={"waiting_queue_policy": "PRIORITY"})
        late, soon = driver.submit("late", 2, 1, priority=5), driver.submit("soon", 2, 1, priority=1)
        assert driver.step().requests == [soon]
        assert driver.step().requests == [late]

    def test_priorities_are_ignored_under_fcfs(self):
        driver = Driver(20, max_batch_size=1)
        first, second = driver.submit("first", 2, 1, priority=5), driver.submit("second", 2, 1, priority=1)
        assert driver.step().requests == [first]
        assert driver.step().requests == [second]


class TestAbort:
    def test_failure_3_between_two_chunks(self):
        """Failure 3 (sgl-project/sglang-jax#984): neither waiting nor decoding, and yet found."""
        driver = Driver(8, max_num_tokens=4)
        a = driver.submit("a", 12)
        driver.step()
        assert a.computed == 4
        driver.scheduler.finish(a, FinishReason.ABORT)
        usage = driver.manager.usage()
        assert (usage.used, usage.free + usage.cached) == (0, 8)
        assert not driver.step().requests

    def test_while_waiting_while_preempted_and_twice(self):
        driver = Driver(4)
        a, b = driver.submit("a", 7, 8), driver.submit("b", 7, 8)
        c = driver.submit("c", 9, 2)
        while not driver.scheduler.preemptions:
            driver.step()
        for request in (b, b, c, c, a, a):
            driver.scheduler.finish(request, FinishReason.ABORT)
        assert driver.manager.usage().used == 0
        assert not len(driver.scheduler.waiting)
        assert not driver.scheduler.running


def paged(pages, page_size, rows):
    return KVCacheManager(pages, page_size, max_rows=rows, max_seq_len=1000)


def with_partial_reuse(pages, page_size, rows):
    return KVCacheManager(pages, page_size, max_rows=rows, max_seq_len=1000, partial_reuse=True)


def growing(pages, page_size, rows):
    return GrowingContiguousManager(pages, page_size, max_rows=rows, max_seq_len=1000)


@pytest.mark.parametrize("kind", [paged, with_partial_reuse, growing])
@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_requests_and_aborts_ends_with_the_right_tokens_and_no_page_held(seed, kind):
    """Hundreds of requests, a tiny pool, shared prefixes, every policy; audited after every step."""
    rng = random.Random(seed)
    pages, page_size, rows = rng.choice((6, 9, 17)), rng.choice((1, 4)), rng.choice((2, 5, 16))
    driver = Driver(
        pages,
        page_size,
        manager=kind(pages, page_size, rows),
        max_batch_size=rows,
        max_num_tokens=rng.choice((2, 5, 16, 64)),
        scheduler={
            "capacity_scheduler_policy": rng.choice(("MAX_UTILIZATION", "GUARANTEED_NO_EVICT")),
            "waiting_queue_policy": rng.choice(("FCFS", "PRIORITY")),
            "watermark": rng.choice((0.0, 0.2)),
            "max_preemptions": rng.choice((0, 1, 3)),
        },
    )
    room = driver.manager.num_pages * driver.manager.page_size
    requests, aborted = [], set()
    for i in range(150):
        length = rng.randint(1, max(1, room // 2))
        prompt = [rng.choice((7, 8)) for _ in range(length)]
        most = rng.randint(1, max(1, min(12, room - length)))
        requests.append(driver.submit(f"r{i}", prompt, most, priority=rng.randint(0, 2)))
        for _ in range(rng.randint(0, 3)):
            driver.step()
        if rng.random() < 0.15:
            victim = rng.choice(requests)
            if victim.status is not Status.FINISHED:
                aborted.add(victim.id)
            driver.scheduler.finish(victim, FinishReason.ABORT)
    driver.run()
    assert all(done(*(r for r in requests if r.id not in aborted)))
    assert driver.manager.usage().used == 0
