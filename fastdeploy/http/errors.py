"""The one map from exceptions to HTTP answers."""

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
# Seconds after which it makes sense to come back: a full queue moves soon, an engine takes a while to restart.
RETRY_AFTER = {429: 1, 503: 2}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_body(error: Exception) -> dict[str, Any]:
    """``{"error": {message, type, code, param, ...detail}}``; a bug of ours shows no more than its class."""
    if not isinstance(error, errors.FastDeployError):
        return {"error": {"message": f"internal error: {type(error).__name__}", "type": "internal_error",
                          "code": "internal_error", "param": None}}  # fmt: skip
    kind = next((name for cls, name in TYPES if isinstance(error, cls)), "internal_error")
    return {"error": {"message": error.message, "type": kind, "code": error.code, "param": None, **error.detail}}


def error_response(error: Exception, **extra: Any) -> Response:
    """The answer to a request that ended in ``error``; ``extra`` goes beside the "error" key."""
    status = errors.STATUS.get(getattr(error, "code", ""), 500)
    if status == 500:
        known = isinstance(error, errors.FastDeployError)  # thousands may fail alike: each is told in one line
        logger.error("request failed: %s", error, exc_info=None if known else error)
    wait = getattr(error, "detail", {}).get("retry_after", RETRY_AFTER.get(status))
    headers = None if wait is None else {"Retry-After": str(wait)}
    return json_response({**error_body(error), **extra}, status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer the exceptions that are part of the contract. middleware.LastResort answers all others."""

    async def on_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = {"message": str(error.detail), "type": "invalid_request_error", "code": "not_found", "param": None}
        if error.status_code == 405:
            body["code"] = "method_not_allowed"
        return json_response({"error": body}, error.status_code, dict(error.headers or {}))

    app.add_exception_handler(errors.FastDeployError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
