"""`pagedkv serve`: the table at the start, and uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from types import FrameType
from typing import Any

import msgspec
import uvicorn
from rich.console import Console
from rich.table import Table

from pagedkv.budget import format_bytes, requests_in_pages
from pagedkv.monitor.kv_publisher import KVEventsConfig
from pagedkv.monitor.record import Record
from pagedkv.serve.app import ServeOptions, build_app
from pagedkv.serve.client import EngineClient
from pagedkv.serve.messages import Ready
from pagedkv.serve.replaying import build_replay

GRACE_SECONDS = 30


def run(console: Console, argument: Mapping[str, Any], options: ServeOptions, host: str, port: int) -> None:
    """Load the model, print what is served, and serve until SIGTERM or SIGINT.

    Args:
        argument: {"path", "overrides"} of the engine's settings.
    """
    _run_loop(_run(console, EngineClient(argument, duties=options.duties()), options, host, port))


def events_settings(text: str) -> Mapping[str, Any]:
    """The settings of --kv-events-config, checked.

    Raises:
        ConfigError: they are no JSON, or say what cannot be.
    """
    return msgspec.structs.asdict(KVEventsConfig.of(text))


def run_replay(console: Console, record: Record, host: str, port: int) -> None:
    """Show a record in the page map until Ctrl-C."""
    app = build_replay(record)
    console.print(f"{len(record):,} steps of {record.header['model']}")
    console.print(f"listening on http://{host}:{port}", highlight=False)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=1)


def _run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run it on uvloop, which is faster, where that is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        asyncio.run(work)
    else:
        uvloop.run(work)


async def _run(console: Console, client: EngineClient, options: ServeOptions, host: str, port: int) -> None:
    app = build_app(client, options)
    try:
        await app.state.server.prepare()
    except BaseException:
        await client.close()
        raise
    assert client.ready is not None
    console.print(start_table(client.ready, options))
    console.print(f"listening on http://{host}:{port}", highlight=False)
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=1)
    await DrainingServer(config, app.state.server).serve()


class DrainingServer(uvicorn.Server):
    """Upon a signal: not ready any more, but there until the running requests have ended, or the grace period has.

    A second signal ends it at once.
    """

    def __init__(self, config: uvicorn.Config, endpoints: Any, grace: float = GRACE_SECONDS) -> None:
        super().__init__(config)
        self._endpoints = endpoints
        self._grace = grace
        self._loop = asyncio.get_running_loop()
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What uvicorn calls for SIGTERM and SIGINT, from within whatever is running."""
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self._drain is None:
            self._drain = self._loop.create_task(self._end())
        else:
            self.should_exit = self.force_exit = True

    async def _end(self) -> None:
        await self._endpoints.drain(self._grace)
        self.should_exit = True


def start_table(ready: Ready, options: ServeOptions) -> Table:
    """What is served, how many requests fit, and which source set what is not a default."""
    table = Table(title="pagedkv serve", title_justify="left", show_header=False)
    tokens = ready.num_pages * ready.page_size
    table.add_row("model", f"{options.served_name or ready.model}, weights {format_bytes(ready.weight_bytes)}")
    table.add_row(
        "pages",
        f"{ready.num_pages:,} of {ready.page_size} tokens, {format_bytes(ready.page_bytes)} each: {tokens:,} tokens, "
        f"{format_bytes(ready.num_pages * ready.page_bytes)}",
    )
    lengths = [length for length in (512, 2048, 8192) if length < ready.max_seq_len] + [ready.max_seq_len]
    fitting = [f"{requests_in_pages(ready.num_pages, length, ready.page_size)} of {length:,}" for length in lengths]
    table.add_row("requests at once, by tokens each", ", ".join(fitting))
    keys = len(options.api_keys) + len(options.tenants)
    table.add_row("API keys", f"{keys}" if keys else "none: everybody may ask")
    for tenant in options.tenants:
        ceiling = "any number" if tenant.ceiling is None else f"{tenant.ceiling:,}"
        table.add_row(f"tenant {tenant.name}", f"sure of {tenant.floor:,} pages, at most {ceiling}")
    for key, value, place in ready.settings:
        if place != "default":
            table.add_row(key, f"{value}  ({place})")
    return table
