"""Streamed text is the whole answer's, byte for byte, whatever bytes the model says and wherever it is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_support import serving

LENGTH = 512


def random_bytes(count: int, seed: int = 7) -> bytes:
    """Characters of one to four bytes, and here and there a byte that belongs to none."""
    draw = random.Random(seed)
    letters = [*"abc ", "\u00e9", "\u00df", "\u4e2d", "\u20ac", "\U0001f600", "\U00010348"]
    said = b""
    while len(said) < count:
        stray = draw.random() < 0.1
        said += bytes([draw.randrange(128, 256)]) if stray else draw.choice(letters).encode()
    return said[:count]


SAID = random_bytes(LENGTH)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    script = {str(position): byte for position, byte in enumerate(SAID)}
    with serving(script=script, max_seq_len=LENGTH) as served, served.http() as client:
        yield client


def whole(http: httpx.Client, body: dict[str, Any]) -> tuple[str, str]:
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    return choice["text"], choice["finish_reason"]


def streamed(http: httpx.Client, body: dict[str, Any]) -> tuple[str, str]:
    lines = http.post("/v1/completions", json=body | {"stream": True}).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks), chunks[-1]["choices"][0]["finish_reason"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_bytes_stream_as_they_are_answered_whole(http: httpx.Client, data: st.DataObject) -> None:
    """FAILURES 115, 117: characters cut by the last token, and stops spread over tokens."""
    start = data.draw(st.integers(1, LENGTH - 60), label="prompt tokens")
    count = data.draw(st.integers(1, 50), label="answer tokens")
    said = SAID[start - 1 : start - 1 + count].decode("utf-8", "replace")
    text, reason = said, "length"
    body: dict[str, Any] = {"prompt": [97] * start, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    if data.draw(st.booleans(), label="with a stop"):
        first = data.draw(st.integers(0, len(said) - 1), label="stop begins")
        body["stop"] = said[first : first + data.draw(st.integers(1, 4), label="stop's length")]
        text, reason = said[: said.index(body["stop"])], "stop"
    assert whole(http, body) == (text, reason)
    assert streamed(http, body) == (text, reason)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_cut_by_the_last_token_is_one_replacement_character(cut: int) -> None:
    """FAILURES 115: in both modes, as valid JSON."""
    smile = "\U0001f600".encode()
    with serving(script={str(3 + i): byte for i, byte in enumerate(smile)}) as other, other.http() as http:
        body = {"prompt": "abcd", "max_tokens": cut, "temperature": 0}
        assert whole(http, body) == streamed(http, body) == ("\ufffd", "length")
        assert whole(http, body | {"max_tokens": 4})[0] == "\U0001f600"
