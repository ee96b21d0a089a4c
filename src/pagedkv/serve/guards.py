"""What stands before the endpoints: the size of a body, the key of a caller, and who may administer."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import HTTPException, Request

from pagedkv.errors import ConfigError
from pagedkv.serve.answers import error_json
from pagedkv.serve.tenants import Caller, Tenant

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class LimitBody:
    """ASGI middleware that answers 413 before a body larger than `most` bytes is read."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], most: int) -> None:
        self.app = app
        self.most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value) > self.most):
                await self._refuse(send)
                return
        read = 0

        async def counted() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.most:
                raise HTTPException(413, f"a body of more than {self.most} bytes")
            return message

        await self.app(scope, counted, send)

    async def _refuse(self, send: Send) -> None:
        body = json.dumps(error_json(f"a body of more than {self.most} bytes", "invalid_request_error")).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class CountAnswers:
    """ASGI middleware that says with which status each request was answered."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], count: Callable[[str], None]) -> None:
        self.app = app
        self.count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.count(str(message["status"]))
            await send(message)

        await self.app(scope, receive, counted)


class Keys:
    """API keys. Compared in constant time, and never shown.

    Args:
        keys: who may ask for completions; nobody needs one if there is none, and no tenant.
        admin_key: who may administer; without it only callers from this machine may.
        tenants: who may ask, too, each with a key of its own.

    Raises:
        ConfigError: two callers have the same key.
    """

    def __init__(self, keys: Sequence[str] = (), admin_key: str | None = None, tenants: Sequence[Tenant] = ()) -> None:
        callers = [(key.encode(), Caller()) for key in dict.fromkeys(keys)]
        callers += [(tenant.api_key.encode(), Caller(tenant)) for tenant in tenants]
        self._callers = dict(callers)
        if len(self._callers) < len(callers):
            raise ConfigError("two callers have the same API key; every tenant needs one of its own")
        self._admin = None if admin_key is None else admin_key.encode()

    def check(self, request: Request) -> Caller:
        """Who calls; 401 unless the caller has a key, where one is needed."""
        if not self._callers:
            return Caller()
        given = _bearer(request)
        # All keys are compared, whichever fits, so that the time says nothing.
        found = [caller for key, caller in self._callers.items() if hmac.compare_digest(given, key)]
        if not found:
            raise HTTPException(401, "this server needs an API key: Authorization: Bearer KEY")
        return found[0]

    def check_metrics(self, request: Request) -> None:
        """Raise 403 unless the caller may see figures: everybody, if there is no admin key."""
        if self._admin is not None:
            self.check_admin(request)

    def check_admin(self, request: Request) -> None:
        """Raise 403 unless the caller may administer."""
        if self._admin is not None:
            if not hmac.compare_digest(_bearer(request), self._admin):
                raise HTTPException(403, "this needs the admin key: Authorization: Bearer KEY")
        elif request.client is None or request.client.host not in _LOOPBACK:
            raise HTTPException(403, "without an admin key, only callers on this machine may do this")
        elif request.url.hostname not in _LOOPBACK or _of_another_page(request):
            raise HTTPException(403, "without an admin key, no web page but the server's own may do this")


def _of_another_page(request: Request) -> bool:
    """Whether a browser on this machine asks on behalf of somebody else's page."""
    origin = request.headers.get("origin")
    return origin is not None and origin != f"{request.url.scheme}://{request.url.netloc}"


def _bearer(request: Request) -> bytes:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip().encode() if scheme.lower() == "bearer" else b""
