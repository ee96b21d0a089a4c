"""What an operator looks at: metrics, the page map with its stream of frames, and single pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from importlib import resources
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from pagedkv.errors import PagedKVError
from pagedkv.monitor.frames import Frame
from pagedkv.monitor.metrics import CONTENT_TYPE
from pagedkv.serve.answers import Json
from pagedkv.serve.client import EngineClient
from pagedkv.serve.guards import Keys
from pagedkv.serve.watching import Watch

disable_created_metrics()  # a second series per counter, which nobody reads

POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_FILES = ("index.html", "style.css", "map.js", "grid.js", "state.js", "stream.js", "charts.js", "panels.js")


class EngineSource:
    """Frames and figures of the engine's process."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def frame(self, full: bool) -> Frame:
        """See `Source`."""
        frame: Frame = await self._client.ask("frame", full=full)
        return frame

    async def figures(self) -> dict[str, Any]:
        """See `Source`."""
        figures: dict[str, Any] = await self._client.ask("figures")
        return figures


class Monitoring:
    """The endpoints. Metrics need the admin key where there is one; what shows pages is for administrators only.

    Args:
        tokenizer: the model's, once it is there.
    """

    def __init__(self, client: EngineClient, keys: Keys, tokenizer: Callable[[], Any], active: Callable[[], int]):
        self.client = client
        self.keys = keys
        self.watch = Watch(EngineSource(client), {"replay": None})
        self._tokenizer = tokenizer
        self._registry = CollectorRegistry()
        self.responses = Counter(
            "pagedkv_http_responses", "Answers of the HTTP side.", ["status"], registry=self._registry
        )
        up = Gauge("pagedkv_engine_up", "1 if the engine's process serves.", registry=self._registry)
        up.set_function(lambda: float(client.ready is not None))
        restarts = Gauge("pagedkv_engine_restarts", "Engine processes started anew.", registry=self._registry)
        restarts.set_function(lambda: float(client.restarts))
        open_ = Gauge("pagedkv_http_requests_open", "Completions being answered.", registry=self._registry)
        open_.set_function(lambda: float(active()))

    def add_routes(self, app: FastAPI) -> None:
        """All of them."""
        for path in ("/metrics", "/v1/metrics"):
            app.get(path, response_model=None)(self.metrics)
        app.get("/v1/iteration-stats")(self.iteration)
        app.get("/v1/pool/stream", response_model=None, include_in_schema=False)(self.stream)  # it does not end
        app.get("/v1/pool/pages/{page}")(self.page)
        app.get("/v1/kv-events/snapshot")(self.kv_snapshot)
        add_page_map(app)

    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus's text format; those of the HTTP side alone while the engine is away."""
        self.keys.check_metrics(request)
        text = generate_latest(self._registry).decode()
        with contextlib.suppress(PagedKVError):  # pagedkv_engine_up says so
            text += await self.client.ask("metrics")
        return Response(text, media_type=CONTENT_TYPE)

    async def iteration(self, request: Request) -> list[Json]:
        """The last iteration, as TensorRT-LLM's server tells it."""
        self.keys.check_metrics(request)
        return [await self.client.ask("iteration")]

    async def stream(self, request: Request) -> Response:
        """Server-sent events: a full frame of the page map, then changes, and figures once a second."""
        self.keys.check_admin(request)
        return StreamingResponse(self.watch.events(), media_type="text/event-stream", headers=_NO_CACHE)

    async def kv_snapshot(self, request: Request) -> Json:
        """Every cached block as KV events, and the number of the batch after which they are right."""
        self.keys.check_admin(request)
        answer: Json = await self.client.ask("kv_snapshot")
        return answer

    async def page(self, page: int, request: Request) -> Json:
        """What a page holds, whose it is, what it continues, and how old it is."""
        self.keys.check_admin(request)
        found: Json = await self.client.ask("page", page=page)
        text = await asyncio.to_thread(self._tokenizer().decode, found["tokens"])
        return {**found, "text": text}


_NO_CACHE = {"cache-control": "no-cache"}


def add_page_map(app: FastAPI) -> None:
    """The page map at `/`, and the files that it is made of. They show nothing without the stream."""

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return _file("index.html")

    @app.get("/ui/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return _file(name)


def _file(name: str) -> Response:
    headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", **_NO_CACHE}
    if name == "plotly.min.js":
        return Response(_plotly(), media_type="text/javascript", headers=headers | {"cache-control": "max-age=86400"})
    if name not in _FILES:
        raise HTTPException(404, f"there is no {name!r} here")
    content = resources.files("pagedkv.serve").joinpath("static", name).read_bytes()
    return Response(content, media_type=_TYPES[name.rpartition(".")[2]], headers=headers)


def _plotly() -> bytes:
    """The chart library, from the package that it comes in."""
    try:
        return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    except ModuleNotFoundError:
        raise HTTPException(404, "charts need the package plotly") from None
