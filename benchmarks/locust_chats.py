"""Locust's side of the load test: each user asks for one streamed chat and reads it to its end, or hangs up.

Run in locust's own environment by serve_load.py. Writes what became of every chat as one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

from locust import HttpUser, events, task

HANG_UP = float(os.environ["CHATS_HANG_UP"])
RESULT = Path(os.environ["CHATS_RESULT"])
TOKENS = int(os.environ["CHATS_TOKENS"])

SYSTEM = "You are a patient assistant. Answer in short, plain sentences, and say so when you do not know. " * 4
found: dict[str, Any] = {"complete": 0, "refused": 0, "left": 0, "broken": [], "stall": 0.0, "tokens": 0}


class Chat(HttpUser):
    """One chat, once."""

    def wait_time(self) -> float:
        """No pause: there is only one task, and it ends the user."""
        return 0.0

    @task
    def ask(self) -> None:
        """Stream an answer; a share of the users leaves in the middle of it."""
        number = random.randrange(10**9)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Tell me about {number}."}]
        body = {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        leaves = random.random() < HANG_UP
        patience = random.randrange(TOKENS) if leaves else TOKENS + 10
        try:
            self.read(body, patience)
        except Exception as error:
            found["broken"].append(f"{type(error).__name__}: {error}")
        time.sleep(3600)  # a user that ended would be replaced by another

    def read(self, body: dict[str, Any], patience: int) -> None:
        """Read one stream, and note how long it was silent at most after its first token."""
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True, timeout=900
        ) as answer:
            answer.success()
            if answer.status_code == 429:
                found["refused"] += 1
                return
            if answer.status_code != 200:
                found["broken"].append(f"{answer.status_code}: {answer.text[:200]}")
                return
            chunks, tokens, last = 0, 0, None
            for line in answer.iter_lines():
                if line == b"data: [DONE]":
                    break
                if not line.startswith(b"data: "):
                    continue
                if b'"error"' in line[:20]:
                    found["broken"].append(line.decode()[:200])
                    return
                if b'"choices":[]' in line:
                    tokens = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
                    continue
                now = time.monotonic()
                found["stall"] = max(found["stall"], now - last) if last is not None else found["stall"]
                chunks, last = chunks + 1, now
                if chunks > patience:
                    found["left"] += 1
                    return
            if tokens == TOKENS:
                found["complete"] += 1
            else:
                found["broken"].append(f"a stream of {tokens} tokens, not {TOKENS}")
            found["tokens"] += tokens


@events.quitting.add_listener
def write(**_: Any) -> None:
    """Say what became of all chats."""
    RESULT.write_text(json.dumps(found), encoding="utf-8")
