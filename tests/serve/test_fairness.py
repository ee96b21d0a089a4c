"""Who is served when: kinds E and F of the public failures, counted in the engine's steps from outside."""

from __future__ import annotations

import threading
from typing import Any

import httpx
from serve_support import Served, serving


def complete(served: Served, prompt: str, tokens: int, **more: Any) -> httpx.Response:
    with served.http() as http:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return http.post("/v1/completions", json=body | more)


def in_background(served: Served, prompts: list[str], tokens: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=complete, args=(served, prompt, tokens)) for prompt in prompts]
    for thread in threads:
        thread.start()
    return threads


def test_a_new_request_gets_its_first_token_while_others_decode() -> None:
    """FAILURES 47: 100 prompt tokens in chunks of what 4 decodes leave of 32 are 4 steps, and a few pass on the way."""
    with serving(step_seconds=0.05, max_num_tokens=32) as served:
        decoding = in_background(served, ["a", "b", "c", "d"], 100)
        before = served.until_running(4)
        assert complete(served, "y" * 100, 1).status_code == 200
        assert served.stats()["steps"] - before <= 12
        for thread in decoding:
            thread.join()


def test_a_decode_goes_on_while_prompts_keep_arriving() -> None:
    """FAILURES 46: it has a token in every step, however many prompts wait for theirs."""
    with serving(step_seconds=0.03, max_num_tokens=16, pages=128, max_batch_size=16) as served:
        answer: list[httpx.Response] = []
        decode = threading.Thread(target=lambda: answer.append(complete(served, "x", 100)))
        decode.start()
        before = served.until_running(1)
        arriving = in_background(served, [f"{number}" * 50 for number in range(10, 40)], 4)
        decode.join()
        assert answer[0].json()["usage"]["completion_tokens"] == 100
        assert served.stats()["steps"] - before <= 115
        for thread in arriving:
            thread.join()


def test_a_pool_that_is_too_small_for_all_ends_them_all() -> None:
    """FAILURES 42: twelve answers that outgrow the pool together preempt each other, and every one ends."""
    with serving(pages=24, max_batch_size=12) as served:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda n=number: answers.append(complete(served, f"request {n}", 80)))
            for number in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [80] * 12
        assert served.stats()["preemptions"] > 0


def test_what_never_fits_is_refused_at_once_and_blocks_nobody() -> None:
    """FAILURES 37, 38: a prompt, or a prompt with its answer, of more than the whole pool."""
    with serving(pages=4, max_seq_len=64) as served, served.http() as http:
        assert http.post("/v1/pool/resize", json={"num_pages": 2}).json()["num_pages"] == 2
        for prompt, tokens in (("y" * 40, 1), ("y" * 20, 20)):
            answer = complete(served, prompt, tokens)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert complete(served, "y" * 20, 12).status_code == 200


def test_a_smaller_priority_goes_first() -> None:
    policy = {"waiting_queue_policy": "PRIORITY"}
    with serving(step_seconds=0.02, max_batch_size=1, scheduler_config=policy) as served:
        order: list[int] = []

        def ask(priority: int) -> None:
            complete(served, f"priority {priority}", 5, priority=priority)
            order.append(priority)

        first = in_background(served, ["x"], 200)
        served.until_running(1)
        waiting = []
        for priority in (2, 1, 3):
            waiting.append(threading.Thread(target=ask, args=(priority,)))
            waiting[-1].start()
        while served.stats()["waiting"] < 3:
            pass
        for thread in first + waiting:
            thread.join()
        assert order == [1, 2, 3]
