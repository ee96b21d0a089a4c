"""The HTTP server: routes, errors as OpenAI's clients know them, and the way up and down.

Knows nothing about tokens or pages: generation.py turns bodies into answers, client.py speaks with the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pagedkv import __version__
from pagedkv.engine.chat import chat_tokens
from pagedkv.errors import InvalidRequestError
from pagedkv.serve.admin import Admin
from pagedkv.serve.answers import Json
from pagedkv.serve.client import EngineClient, EngineDeadError
from pagedkv.serve.error_responses import ClientGoneError, add_error_handlers
from pagedkv.serve.generation import Body, Call
from pagedkv.serve.guards import CountAnswers, Keys, LimitBody
from pagedkv.serve.messages import Duties
from pagedkv.serve.model_text import ModelText
from pagedkv.serve.monitoring import Monitoring
from pagedkv.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pagedkv.serve.tenants import Tenant


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the HTTP side is told.

    Attributes:
        api_keys: who may ask for completions; everybody, if there is none.
        admin_key: who may reset the cache and see the pool; callers on this machine, if there is none.
        max_body_bytes: largest request body.
        served_name: what the model is called; None for its own name.
        tenants: callers with a key, a namespace and limits of their own.
        chat_template: Jinja text to be used instead of the model's.
        cors_origins: web pages of these origins may call from a browser; "*" for all.
        record: file that everything that happens to pages and requests is written to.
        kv_events: settings of `KVEventsConfig`; None for no events.
        log_requests: whether each answer that has ended is told on stderr.
    """

    api_keys: Sequence[str] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 8 * 1024**2
    served_name: str | None = None
    tenants: Sequence[Tenant] = ()
    chat_template: str | None = field(default=None, repr=False)
    cors_origins: Sequence[str] = ()
    record: Path | None = None
    kv_events: Mapping[str, Any] | None = None
    log_requests: bool = False

    def duties(self) -> Duties:
        """What the engine's process is told of these."""
        return Duties(
            limits=[tenant.limit for tenant in self.tenants if tenant.limit is not None],
            record=None if self.record is None else str(self.record.absolute()),
            kv_events=None if self.kv_events is None else dict(self.kv_events),
            log_requests=self.log_requests,
        )


def build_app(client: EngineClient, options: ServeOptions | None = None) -> FastAPI:
    """The application around a client that has been started, or is started by the application's own start."""
    server = _Server(client, options or ServeOptions())
    app = FastAPI(title="pagedkv", version=__version__, lifespan=server.lifespan)
    app.add_middleware(LimitBody, most=server.options.max_body_bytes)
    if server.options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    server.add_routes(app)
    Admin(client, server.keys).add_routes(app)
    server.monitoring.add_routes(app)
    app.add_middleware(CountAnswers, count=lambda status: server.monitoring.responses.labels(status).inc())
    add_error_handlers(app)
    app.state.server = server
    return app


class _EventStream(StreamingResponse):
    """Server-sent events; whoever stops reading, or never begins to, ends the request."""

    def __init__(self, events: Any, closed: Callable[[], None], headers: Mapping[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        self._events = events
        self._closed = closed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._closed()
            await self._events.aclose()


class _Server:
    """The endpoints, and what they share."""

    def __init__(self, client: EngineClient, options: ServeOptions) -> None:
        self.client = client
        self.options = options
        self.keys = Keys(options.api_keys, options.admin_key, options.tenants)
        self.text: ModelText | None = None
        self.monitoring = Monitoring(client, self.keys, lambda: self.tokenizer, lambda: self.active)
        self.draining = False
        self.active = 0
        self.started = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Load the model, serve, and let the engine's process end."""
        await self.prepare()
        self.monitoring.watch.start()
        try:
            yield
        finally:
            self.draining = True
            await self.monitoring.watch.stop()
            await self.client.close()

    async def prepare(self) -> None:
        """Have the engine and the tokenizer ready, unless they are.

        Raises:
            ConfigError: the engine or the chat template cannot be used.
        """
        if self.client.ready is None:
            await self.client.start()
        if self.text is None:
            folder = self.client.tokenizer_folder
            self.text = await asyncio.to_thread(ModelText.load, folder, self.options.chat_template)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        assert self.text is not None  # prepared before the first request
        return self.text.tokenizer

    def add_routes(self, app: FastAPI) -> None:
        """All endpoints."""
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.post("/v1/completions", response_model=None)(self.completions)
        app.get("/v1/models")(self.models)
        app.get("/v1/version")(self.version)
        app.get("/v1/metadata")(self.metadata)
        app.get("/v1/health/live")(self.live)
        for path in ("/v1/health/ready", "/health"):
            app.get(path, response_model=None)(self.ready)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)

    @property
    def model(self) -> str:
        """What the model is called."""
        return self.options.served_name or (self.client.ready.model if self.client.ready else "")

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """The next turn of a conversation."""
        return await self._generate(body, request)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """The continuation of one text or several."""
        return await self._generate(body, request)

    async def _generate(self, body: Body, request: Request) -> Response:
        caller = self.keys.check(request)
        if self.draining:
            raise EngineDeadError("the server is shutting down")
        self._check_model(body.model)
        self.active += 1
        streaming = False
        try:
            assert self.text is not None
            call = await Call.of(self.client, self.text, body, self.model, caller)
            headers = {"x-request-id": call.form.id}  # of our own making, whatever the client sends
            if not body.stream:
                return JSONResponse(await _unless_gone(request, call.whole()), headers=headers)
            events = call.events()
            await anext(events)  # queued, or refused with a status of its own
            streaming = True
        finally:
            self.active -= not streaming
        return _EventStream(events, self._closed, headers)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise HTTPException(404, f"there is no model {name!r} here; there is {self.model!r}")

    def _closed(self) -> None:
        self.active -= 1

    async def drain(self, seconds: float) -> bool:
        """Take no more requests, and wait until those there are have ended; false if some had not by then."""
        self.draining = True
        end = time.monotonic() + seconds
        while self.active and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self.monitoring.watch.end()
        return not self.active

    async def models(self, request: Request) -> Json:
        """The one model that is served."""
        self.keys.check(request)
        ready = self.client.ready
        longest = None if ready is None else ready.max_seq_len
        card = {"id": self.model, "object": "model", "created": self.started, "owned_by": "pagedkv"}
        return {"object": "list", "data": [{**card, "max_model_len": longest}]}

    async def version(self) -> Json:
        """Which pagedkv this is."""
        return {"version": __version__}

    async def metadata(self, request: Request) -> Json:
        """Sizes of the pool, and every setting with the source that set it."""
        self.keys.check(request)
        ready = self.client.ready
        if ready is None:
            raise EngineDeadError("the engine is being restarted")
        names = ("max_seq_len", "vocab_size", "num_pages", "page_size", "page_bytes", "weight_bytes")
        settings = [{"key": key, "value": value, "source": place} for key, value, place in ready.settings]
        return {"model": self.model, **{name: getattr(ready, name) for name in names}, "settings": settings}

    async def live(self) -> Json:
        """200 as long as this process answers."""
        return {"status": "live"}

    async def ready(self) -> Response:
        """200 if requests can be served now, 503 otherwise."""
        good = self.client.ready is not None and not self.draining
        return JSONResponse({"status": "ready" if good else "not ready"}, 200 if good else 503)

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Json:
        """Token ids of a text or a conversation."""
        self.keys.check(request)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages")
        if body.messages is not None:
            turns = [message.turn() for message in body.messages]
            ids = await asyncio.to_thread(chat_tokens, self.tokenizer, turns)
        else:
            encoded = await asyncio.to_thread(self.tokenizer, body.prompt, add_special_tokens=body.add_special_tokens)
            ids = list(encoded["input_ids"])
        longest = None if self.client.ready is None else self.client.ready.max_seq_len
        return {"tokens": ids, "count": len(ids), "max_model_len": longest}

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Json:
        """The text of token ids."""
        self.keys.check(request)
        self._check_model(body.model)
        size = len(self.tokenizer)
        if body.tokens and max(body.tokens) >= size:
            raise InvalidRequestError(f"token id {max(body.tokens)} is outside the vocabulary of {size}")
        return {"prompt": await asyncio.to_thread(self.tokenizer.decode, body.tokens)}


async def _unless_gone(request: Request, work: Any) -> Json:
    """Await the work, unless the client leaves before it is done: then it is ended."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            answer: Json = task.result()
            return answer
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
