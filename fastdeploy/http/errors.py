"""The map from exceptions to HTTP answers."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fastdeploy.core import errors

logger = logging.getLogger(__name__)
TYPES = (
    (errors.QueueFull, "rate_limit_error"),
    (errors.ServerBusy, "rate_limit_error"),
    (errors.RequestsRejected, "service_unavailable_error"),
    (errors.RequestError, "invalid_request_error"),
    (errors.ControlError, "control_error"),
    (errors.EngineError, "engine_error"),
)
# Seconds after which a client may try again: a full queue has room soon, and a restart of the engine takes longer.
RETRY_AFTER = {429: 1, 503: 2}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_body(error: Exception) -> dict[str, Any]:
    """Return ``{"error": {message, type, code, param, ...detail}}``. An unexpected exception shows only its class."""
    if not isinstance(error, errors.FastDeployError):
        return _body(f"internal error: {type(error).__name__}", "internal_error", "internal_error", {})
    kind = next((name for cls, name in TYPES if isinstance(error, cls)), "internal_error")
    return _body(error.message, kind, error.code, error.detail)


def _body(message: str, kind: str, code: str | int, detail: dict[str, Any]) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": code, "param": None, **detail}}


def error_response(error: Exception, **extra: Any) -> Response:
    """Return the answer to a request that failed with ``error``. ``extra`` has further fields beside "error"."""
    status = errors.STATUS.get(getattr(error, "code", ""), 500)
    if status == 500:
        known = isinstance(error, errors.FastDeployError)  # logged in one line: thousands of requests may fail alike
        logger.error("request failed: %s", error, exc_info=None if known else error)
    wait = getattr(error, "detail", {}).get("retry_after", RETRY_AFTER.get(status))
    headers = {} if wait is None else {"Retry-After": str(wait)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response({**error_body(error), **extra}, status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer our own exceptions and those of the router. app.LastResort answers all others."""

    async def on_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        body = _body(str(error.detail), "invalid_request_error", code, {})
        return json_response(body, error.status_code, dict(error.headers or {}))

    app.add_exception_handler(errors.FastDeployError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
