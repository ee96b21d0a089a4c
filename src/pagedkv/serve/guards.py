"""What stands before the endpoints: the size of a body, the key of a caller, and who may administer."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import HTTPException, Request

from pagedkv.serve.answers import error_json

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


class Keys:
    """API keys. Compared in constant time, and never shown.

    Args:
        keys: who may ask for completions; nobody needs one if there is none.
        admin_key: who may administer; without it only callers from this machine may.
    """

    def __init__(self, keys: Sequence[str] = (), admin_key: str | None = None) -> None:
        self._keys = [key.encode() for key in keys]
        self._admin = None if admin_key is None else admin_key.encode()

    def check(self, request: Request) -> None:
        """Raise 401 unless the caller has a key, where one is needed."""
        given = _bearer(request)
        # All keys are compared, whichever fits, so that the time says nothing.
        if self._keys and sum(hmac.compare_digest(given, key) for key in self._keys) == 0:
            raise HTTPException(401, "this server needs an API key: Authorization: Bearer KEY")

    def check_admin(self, request: Request) -> None:
        """Raise 403 unless the caller may administer."""
        if self._admin is not None:
            if not hmac.compare_digest(_bearer(request), self._admin):
                raise HTTPException(403, "this needs the admin key: Authorization: Bearer KEY")
        elif request.client is None or request.client.host not in _LOOPBACK:
            raise HTTPException(403, "without an admin key, only callers on this machine may do this")


def _bearer(request: Request) -> bytes:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip().encode() if scheme.lower() == "bearer" else b""
