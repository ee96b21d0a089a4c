"""What the server's tests share: an engine that needs no model, and a server around it in a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

ENGINE_TESTS = Path(__file__).resolve().parent.parent / "engine"
sys.path.insert(0, str(ENGINE_TESTS))  # for the process that imports this file by name, too

from fake_model import FakeModel  # noqa: E402

from pagedkv.config import EngineConfig  # noqa: E402
from pagedkv.engine.engine import Engine  # noqa: E402
from pagedkv.serve.app import ServeOptions, build_app  # noqa: E402
from pagedkv.serve.client import EngineClient  # noqa: E402

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def fake_engine(argument: dict[str, Any]) -> Engine:
    """An engine on the fake model; `step_seconds` makes its steps slow, `script` says what it says where."""
    seconds = argument.pop("step_seconds", 0.0)
    script = {int(position): token for position, token in argument.pop("script", {}).items()}
    model = FakeModel(fault=(lambda *_: time.sleep(seconds)) if seconds else None, script=script)
    model.tokenizer.chat_template = argument.pop("chat_template", CHAT_TEMPLATE)
    pages = argument.pop("pages", 64)
    settings = {"max_seq_len": 256, "kv_cache_config": {"max_tokens": pages * 16}} | argument
    return Engine(model, EngineConfig(**settings))  # type: ignore[arg-type]


class Served:
    """A server that listens on a free port of this machine."""

    def __init__(self, options: ServeOptions | None = None, **argument: Any) -> None:
        duties = (options or ServeOptions()).duties()
        self.client = EngineClient(argument, factory="serve_support:fake_engine", duties=duties)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        app = build_app(self.client, options)
        config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="warning", timeout_graceful_shutdown=5)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def stats(self) -> dict[str, Any]:
        """The engine's own figures, asked for from outside the server's loop."""
        import asyncio

        loop = self.loop
        return asyncio.run_coroutine_threadsafe(self.client.ask("stats"), loop).result(10)

    def faults(self) -> list[str]:
        """What the auditor finds in the engine's process."""
        import asyncio

        return asyncio.run_coroutine_threadsafe(self.client.ask("audit"), self.loop).result(10)

    @property
    def loop(self) -> Any:
        return self.client._tasks and next(iter(self.client._tasks)).get_loop()

    def until_running(self, count: int, seconds: float = 10.0) -> int:
        """Wait until so many run, and return the number of steps then."""
        end = time.monotonic() + seconds
        while (stats := self.stats())["running"] < count:
            assert time.monotonic() < end, stats
        return int(stats["steps"])

    def idle(self, seconds: float = 5.0) -> dict[str, Any]:
        """Wait until nothing runs or waits, and return the figures then."""
        end = time.monotonic() + seconds
        while (stats := self.stats())["running"] or stats["waiting"]:
            assert time.monotonic() < end, stats
            time.sleep(0.01)
        return stats


@contextlib.contextmanager
def serving(options: ServeOptions | None = None, **argument: Any) -> Iterator[Served]:
    """A server until the block ends; no page may be left in use then."""
    served = Served(options, **argument)
    served.thread.start()
    try:
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError), served.http() as http:
                if http.get("/health").status_code == 200:
                    break
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.05)
        yield served
        if served.client.ready is not None:
            stats = served.idle()
            assert stats["usage"]["used"] == 0
            assert served.faults() == []
    finally:
        served.server.should_exit = True
        served.thread.join(20)
