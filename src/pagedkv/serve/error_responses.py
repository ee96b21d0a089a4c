"""Failures as OpenAI's clients know them: a status, and JSON with a sentence; never a stack trace."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from pagedkv.errors import InvalidRequestError, NeverFitsError, PagedKVError, QueueFullError
from pagedkv.serve.answers import error_json
from pagedkv.serve.client import EngineDeadError, RequestTimeoutError

RETRY_SECONDS = 1


class ClientGoneError(Exception):
    """Nobody is there to be answered."""


def add_error_handlers(app: FastAPI) -> None:
    """Every failure as JSON of OpenAI's form, without a stack trace."""

    @app.exception_handler(RequestValidationError)
    async def invalid_body(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        return JSONResponse(error_json(message, "invalid_request_error", param=where or None), 400)

    @app.exception_handler(StarletteHTTPException)
    async def refused(_: Request, error: StarletteHTTPException) -> JSONResponse:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        code = {401: "invalid_api_key", 404: "model_not_found"}.get(error.status_code)
        return JSONResponse(error_json(str(error.detail), kind, code=code), error.status_code)

    @app.exception_handler(PagedKVError)
    async def failed(_: Request, error: PagedKVError) -> JSONResponse:
        status, kind, code = _status(error)
        headers = {"retry-after": str(RETRY_SECONDS)} if status in (429, 503) else None
        return JSONResponse(error_json(str(error), kind, code=code), status, headers)

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_json(f"internal error ({type(error).__name__})", "server_error"), 500)


def _status(error: PagedKVError) -> tuple[int, str, str | None]:
    """HTTP status, OpenAI's type and code of one of our errors."""
    if isinstance(error, NeverFitsError):
        return 400, "invalid_request_error", "context_length_exceeded"
    if isinstance(error, InvalidRequestError):
        return 400, "invalid_request_error", None
    if isinstance(error, QueueFullError):
        return 429, "rate_limit_error", "queue_full"
    if isinstance(error, RequestTimeoutError):
        return 408, "timeout", None
    if isinstance(error, EngineDeadError):
        return 503, "server_error", "engine_unavailable"
    return 500, "server_error", None
