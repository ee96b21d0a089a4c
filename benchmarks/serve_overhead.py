"""What HTTP costs: 256 streams through `pagedkv serve`, against the same prompts on an engine in this process.

The client speaks bare HTTP over its sockets, so that it takes as little of the machine as it can.
"""

from __future__ import annotations

import asyncio
import json
import time

from benchmarks.report import Row, compare
from benchmarks.serve_load import PORT, server
from pagedkv.config import EngineConfig
from pagedkv.engine.engine import Engine
from pagedkv.engine.params import SamplingParams

STREAMS = 256
TOKENS = 32
ROUNDS = 2
MEMORY = "256MiB"


def run() -> list[Row]:
    """Output tokens per second, through HTTP and without; through HTTP at least 85 % are to be left."""
    alone = served = 0.0
    for _ in range(ROUNDS):
        alone = max(alone, in_process())
        with server(MEMORY):
            served = max(served, asyncio.run(through_http()), asyncio.run(through_http()))
    return [
        compare(
            f"{STREAMS} streams of {TOKENS} tokens through HTTP",
            served,
            alone,
            "the engine in this process",
            "tokens/s",
            better="higher",
            target=0.85,
        )
    ]


def prompts() -> list[str]:
    """One short text per stream."""
    return [f"Stream number {number} tells a story about" for number in range(STREAMS)]


def in_process() -> float:
    """Output tokens per second of the engine alone, the best of several rounds."""
    config = EngineConfig.load(overrides={"max_seq_len": 1024, "kv_cache_config.max_memory": MEMORY})
    engine = Engine.from_config(config)
    engine.warm_up()
    best = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for prompt in prompts():
            engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
        while engine.has_unfinished:
            engine.step()
        best = max(best, STREAMS * TOKENS / (time.perf_counter() - start))
    return best


async def through_http() -> float:
    """Output tokens per second of all streams together."""
    start = time.perf_counter()
    counts = await asyncio.gather(*(stream(prompt) for prompt in prompts()))
    if set(counts) != {TOKENS}:
        raise AssertionError(f"streams of {sorted(set(counts))} tokens, not {TOKENS}")
    return STREAMS * TOKENS / (time.perf_counter() - start)


async def stream(prompt: str) -> int:
    """Read one stream to its end; returns the tokens that its usage counts."""
    wishes = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    wishes |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"prompt": prompt} | wishes).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(head.encode() + body)
    tokens = 0
    while True:
        line = await reader.readline()
        if not line or line.startswith(b"data: [DONE]"):
            break
        if b'"choices":[]' in line:
            tokens = int(json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"])
    writer.close()
    return tokens
