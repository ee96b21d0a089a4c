"""What only administrators may do: forget cached content, give the pool another size, look at every page."""

from __future__ import annotations

from fastapi import FastAPI, Request

from pagedkv.serve.answers import Json
from pagedkv.serve.client import EngineClient
from pagedkv.serve.guards import Keys
from pagedkv.serve.schemas import ResetRequest, ResizeRequest


class Admin:
    """The endpoints for callers with the admin key, or on this machine if there is none."""

    def __init__(self, client: EngineClient, keys: Keys) -> None:
        self.client = client
        self.keys = keys

    def add_routes(self, app: FastAPI) -> None:
        """All of them."""
        app.post("/v1/cache/reset")(self.reset)
        app.post("/v1/pool/resize")(self.resize)
        app.get("/v1/pool/snapshot")(self.snapshot)

    async def reset(self, request: Request, body: ResetRequest | None = None) -> Json:
        """Forget cached content: all of it without a body, or what was computed in one namespace."""
        self.keys.check_admin(request)
        scope = {} if body is None else {"namespace": body.namespace}
        answer: Json = await self.client.ask("reset", **scope)
        return answer

    async def resize(self, body: ResizeRequest, request: Request) -> Json:
        """Give the pool another number of pages while requests run; it keeps more as long as these need them."""
        self.keys.check_admin(request)
        return {"asked": body.num_pages, "num_pages": await self.client.resize(body.num_pages)}

    async def snapshot(self, request: Request) -> Json:
        """Where every page is now."""
        self.keys.check_admin(request)
        answer: Json = await self.client.ask("snapshot")
        return answer
