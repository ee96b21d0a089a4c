"""The whole engine on the demonstration's workload, against transformers' own padded batched `generate`.

Both answer the same chats, greedily, on the same weights, with room for the same number of tokens of keys and values.
transformers gets batches as large as that room allows: left-padded to the longest prompt, kept until the longest answer
is done. Only tokens that a chat asked for count as its output.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from benchmarks.report import Row, compare
from pagedkv.config import EngineConfig
from pagedkv.demo.run import Run, run_chats
from pagedkv.demo.workload import make_chats
from pagedkv.engine.chat import chat_tokens
from pagedkv.engine.engine import Engine
from pagedkv.models.load import load_model

CHATS = 64
TARGET = 2.0


def run() -> list[Row]:
    """Output tokens per second of both."""
    model = load_model()
    chats = make_chats(CHATS, 0)
    prompts = [
        chat_tokens(model.tokenizer, [{"role": "system", "content": c.system}, {"role": "user", "content": c.user}])
        for c in chats
    ]
    config = EngineConfig(max_seq_len=2048, kv_cache_config={"max_memory": "256MiB"})
    Engine(model, config).warm_up()
    engine = Engine(model, config)
    room = engine.store.num_pages * engine.store.page_size
    ours = run_chats(engine, "paged", chats, prompts, _ignore)
    twin = copy.deepcopy(model.model)
    twin.set_attn_implementation("sdpa")
    theirs = _generate(twin, prompts, [chat.max_tokens for chat in chats], room, model.eos_token_ids)
    return [
        compare(
            f"demo workload, {CHATS} chats in {room} tokens of KV",
            ours.tokens_per_second,
            theirs,
            "transformers generate, padded batches, sdpa",
            "tokens/s",
            better="higher",
            target=TARGET,
        )
    ]


def _ignore(_: Run) -> None:
    """The benchmark shows nothing while it runs."""


def _generate(model: Any, prompts: list[list[int]], most: list[int], room: int, eos: frozenset[int]) -> float:
    """Output tokens per second of padded batches that fill the room."""
    start, count = time.perf_counter(), 0
    at = 0
    while at < len(prompts):
        size = 1
        while at + size < len(prompts) and _padded(prompts, most, at, size + 1) <= room:
            size += 1
        count += _generate_batch(model, prompts[at : at + size], most[at : at + size], eos)
        at += size
    return count / (time.perf_counter() - start)


def _padded(prompts: list[list[int]], most: list[int], at: int, size: int) -> int:
    """Tokens of keys and values that a padded batch takes at its end."""
    longest = max(len(prompt) for prompt in prompts[at : at + size])
    return size * (longest + max(most[at : at + size]))


def _generate_batch(model: Any, prompts: list[list[int]], most: list[int], eos: frozenset[int]) -> int:
    """Generate for one batch; returns the tokens that were asked for, up to each chat's end."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(most),
            do_sample=False,
            repetition_penalty=1.1,
            eos_token_id=sorted(eos),
            pad_token_id=0,
        )
    count = 0
    for row, limit in zip(out[:, width:].tolist(), most, strict=True):
        ends = [place + 1 for place, token in enumerate(row) if token in eos]
        count += min(limit, ends[0] if ends else limit)
    return count
