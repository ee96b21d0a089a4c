"""Tenants, the pool's size, the chat template, and web pages: what an operator decides."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_model import expected_text
from serve_support import Served, serving

from pagedkv.errors import ConfigError
from pagedkv.serve.app import ServeOptions
from pagedkv.serve.guards import Keys
from pagedkv.serve.tenants import Tenant, read_tenants

ACME = Tenant(name="acme", api_key="a-key", floor=8, ceiling=16)
BETA = Tenant(name="beta", api_key="b-key")
PROMPT = "a prompt of more than sixteen tokens"


def complete(served: Served, key: str = "", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with served.http(headers=headers) as http:
        return http.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, "max_tokens": 1} | body)


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def tenants() -> Iterator[Served]:
    """32 pages; one tenant is sure of 8 and may have 16."""
    with serving(ServeOptions(tenants=[ACME, BETA], api_keys=["plain"]), pages=32, max_seq_len=512) as served:
        yield served


def test_tenants_share_with_nobody_else(tenants: Served) -> None:
    assert complete(tenants).status_code == 401
    assert cached(complete(tenants, "b-key")) == 0
    assert cached(complete(tenants, "b-key")) == 32
    assert cached(complete(tenants, "a-key")) == 0
    assert cached(complete(tenants, "plain")) == 0
    assert cached(complete(tenants, "b-key", cache_salt="s")) == 0
    with tenants.http() as http:
        body = {"tenant": "beta", "cache_salt": "s"}
        assert http.post("/v1/cache/reset", json=body).json() == {"dropped": 2, "held": 0}
    assert cached(complete(tenants, "b-key")) == 32


def test_a_ceiling_refuses_what_never_fits_it(tenants: Served) -> None:
    answer = complete(tenants, "a-key", prompt="x" * 257)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert complete(tenants, "b-key", prompt="x" * 257).status_code == 200
    assert complete(tenants, "b-key", prompt="x" * 385).status_code == 400  # 25 pages; the floor leaves it 24


def test_a_tenant_with_limits_has_one_namespace(tenants: Served) -> None:
    answer = complete(tenants, "a-key", cache_salt="s")
    assert answer.status_code == 400
    assert "cache_salt is not served to a tenant with a floor or a ceiling" in answer.json()["error"]["message"]


def test_limits_hold_after_the_engine_was_replaced() -> None:
    with serving(ServeOptions(tenants=[ACME]), pages=32) as served:
        process = served.client._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while served.client.restarts == 0 or served.client.ready is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert complete(served, "a-key", prompt="x" * 250, max_tokens=6).status_code == 200
        with served.http() as http:
            assert http.post("/v1/pool/resize", json={"num_pages": 7}).status_code == 400  # less than the floor


def test_floors_beyond_the_pool_are_said_before_serving() -> None:
    import asyncio

    from pagedkv.serve.client import EngineClient

    async def start() -> None:
        duties = ServeOptions(tenants=[ACME]).duties()
        client = EngineClient({"pages": 4, "max_seq_len": 64}, factory="serve_support:fake_engine", duties=duties)
        try:
            with pytest.raises(ConfigError, match="a floor of 8 pages beside 0 of other namespaces exceeds 4 pages"):
                await client.start()
        finally:
            await client.close()

    asyncio.run(start())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acme:\n  api_key: k\n  cieling: 4\n", ":3: acme.cieling: Extra inputs are not permitted"),
        ("acme:\n  floor: 4\n", "acme.api_key: Field required"),
        ("acme:\n  api_key: 5\n", ":2: acme.api_key: Input should be a valid string"),
        ("acme:\n  api_key: k\n  floor: -1\n", ":3: acme.floor: Input should be greater than or equal to 0"),
        ("acme:\n  api_key: k\nacme:\n  api_key: l\n", ":3: acme stands here a second time"),
        ("acme: k\n", ":1: acme must be a mapping"),
    ],
)
def test_a_wrong_file_of_tenants_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_tenants(path)
    assert message in str(refused.value)


def test_a_file_of_tenants(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("acme:\n  api_key: a-key\n  floor: 8\n  ceiling: 16\nbeta:\n  api_key: b-key\n")
    assert read_tenants(path) == [ACME, BETA]
    assert "a-key" not in repr(read_tenants(path))


def test_no_two_callers_have_one_key() -> None:
    with pytest.raises(ConfigError, match="two callers have the same API key"):
        Keys(["a-key"], tenants=[ACME])


def test_the_pool_grows_and_shrinks_while_requests_run() -> None:
    with serving(step_seconds=0.05, pages=64) as served:
        answers: list[httpx.Response] = []
        running = threading.Thread(target=lambda: answers.append(complete(served, max_tokens=100, ignore_eos=True)))
        running.start()
        served.until_running(1)
        with served.http() as http:
            for asked, given in ((128, 128), (20, 20), (1, 9)):  # 36 + 100 tokens, but the last is never stored
                answer = http.post("/v1/pool/resize", json={"num_pages": asked})
                assert (answer.status_code, answer.json()) == (200, {"asked": asked, "num_pages": given})
                assert http.get("/v1/metadata").json()["num_pages"] == given
            running.join()
            assert answers[0].json()["choices"][0]["text"] == expected_text(PROMPT, 100)
            assert http.post("/v1/pool/resize", json={"num_pages": 1}).json()["num_pages"] == 1
            assert http.post("/v1/pool/resize", json={"num_pages": 0}).status_code == 400
            assert http.post("/v1/pool/resize", json={"num_pages": "many"}).status_code == 400
            answer = http.post("/v1/pool/resize", json={"num_pages": 2**31 - 1})
            assert answer.status_code == 400
            assert "are free" in answer.json()["error"]["message"]
            assert complete(served).status_code == 400  # 36 tokens in one page
            assert http.post("/v1/pool/resize", json={"num_pages": 8}).json()["num_pages"] == 8
        assert complete(served).status_code == 200


def test_another_chat_template_is_used() -> None:
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    with serving(ServeOptions(chat_template=template)) as served, served.http() as http:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == expected_text("<hi>", 3)


def test_a_chat_template_that_is_none_is_refused(tmp_path: Path) -> None:
    from fake_model import byte_tokenizer

    from pagedkv.serve.model_text import ModelText

    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="the chat template cannot be used"):
        ModelText.load(tmp_path, "{% for m in messages %}")


def test_a_web_page_of_somebody_else_may_not_administer(tenants: Served) -> None:
    """Without an admin key: neither a page that calls this machine, nor one whose name has been pointed to it."""
    with tenants.http() as http:
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"host": "evil.example", "origin": "http://evil.example"},
        ):
            assert http.post("/v1/cache/reset", headers=headers).status_code == 403
        own = {"origin": tenants.url}
        assert http.get("/v1/pool/snapshot", headers=own).status_code == 200


def test_cross_origin_calls_are_off_unless_an_origin_is_named(tenants: Served) -> None:
    ask = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    with tenants.http() as http:
        assert "access-control-allow-origin" not in http.options("/v1/completions", headers=ask).headers
    with serving(ServeOptions(cors_origins=["https://chat.example"])) as served, served.http() as http:
        answer = http.options("/v1/completions", headers=ask)
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        other = http.options("/v1/completions", headers=ask | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_request_ids_are_the_servers_own(tenants: Served) -> None:
    """FAILURES 119: two calls under one id of the client's are two requests, whose outputs never mix."""
    headers = {"authorization": "Bearer plain", "x-request-id": "mine"}
    with tenants.http(headers=headers) as http:
        answers = [
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "temperature": 0})
            for prompt in ("one", "three")
        ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids == [answer.json()["id"] for answer in answers]
    assert len({"mine", *ids}) == 3
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [
        expected_text("one", 4),
        expected_text("three", 4),
    ]
