"""The HTTP application of one API server: its routes, middleware and error handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from fastapi import APIRouter, FastAPI
from prometheus_client.registry import Collector
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.process import VERSION
from fastdeploy.http.answer_counts import CountAnswers
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import adapters_router
from fastdeploy.http.control.operation import control_router, health_router
from fastdeploy.http.control.weights import weights_router
from fastdeploy.http.dialects.areal import areal_router
from fastdeploy.http.dialects.fastdeploy.form import form_router, refused
from fastdeploy.http.dialects.fastdeploy.routes import fastdeploy_router
from fastdeploy.http.dialects.fastdeploy.weights import FolderWeights
from fastdeploy.http.dialects.sglang.routes import sglang_router
from fastdeploy.http.dialects.skyrl.routes import skyrl_router
from fastdeploy.http.dialects.vllm.routes import vllm_router
from fastdeploy.http.errors import add_error_handlers, error_response, json_response
from fastdeploy.http.fleet.routes import fleet_router
from fastdeploy.http.fleet.spool import spool_router
from fastdeploy.http.guards.body_limit import BodyLimit
from fastdeploy.http.guards.browser_guard import PagePolicy
from fastdeploy.http.guards.budget import Budget
from fastdeploy.http.guards.keys import NO_KEYS, Keys
from fastdeploy.http.guards.route_access import AccessPolicy, RouteAccess, RouteTable
from fastdeploy.http.openai.chat import chat_router
from fastdeploy.http.openai.completion import completion_router
from fastdeploy.http.openapi import DescribedApp, page
from fastdeploy.http.sessions.agents import Agents
from fastdeploy.http.sessions.routes import sessions_router
from fastdeploy.http.sessions.store import SessionStore
from fastdeploy.http.ui.feed import ui_router
from fastdeploy.http.upload_files import remove_leftovers

logger = logging.getLogger(__name__)
# The groups of routes, in the order of /docs.
ROUTERS = {
    "OpenAI": (completion_router, chat_router),
    "Control": (control_router,),
    "Weights": (weights_router,),
    "Adapters": (adapters_router,),
    "Operation": (health_router,),
    "Fleet": (fleet_router, spool_router),
    "vLLM": (vllm_router,),
    "SkyRL": (skyrl_router,),
    "SGLang": (sglang_router,),
    "AReaL": (areal_router,),
}


class Extension(Protocol):
    """Routes, a metric and middleware that a server has beside its own: those of fastdeploy.faults. middleware: wraps
    an application. may_control: returns the error for a request that may not use control routes."""

    @property
    def collector(self) -> Collector: ...

    def router(self) -> APIRouter: ...

    def middleware(self, app: ASGIApp, may_control: Callable[[Scope], FastDeployError | None]) -> ASGIApp: ...


def create_app(
    client: ServingClient,
    tokenizer: Tokenizer | None,
    config: ServeConfig,
    keys: Keys = NO_KEYS,
    faults: Extension | None = None,
) -> FastAPI:
    """Return the HTTP application. Its start starts ``client``, and its end closes ``client``."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        remove_leftovers(config)
        client.start().add_done_callback(_end_process)
        yield
        await client.close()
        await store.close()
        context.upload_files.close()

    app = DescribedApp(
        title="FastDeploy",
        version=VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    uploads = Budget(config.max_uploads, config.body_idle_s, "the number of weight uploads (--max-uploads)")
    context = ServingContext(client, tokenizer, config, uploads)
    routers = [(tag, router(context)) for tag, group in ROUTERS.items() for router in group]
    store = SessionStore(config.session_dir, config.max_sessions_mb << 20, config.session_ttl_s)
    routers.insert(2, ("Sessions", sessions_router(Agents(context, store, keys))))
    weights = FolderWeights(client, config.model)
    routers.append(("FastDeploy", fastdeploy_router(context, weights)))
    if config.fastdeploy_form:
        routers.insert(0, ("FastDeploy", form_router(context, weights)))
    routers += [("", docs_router(app)), ("", ui_router(client))]
    if faults is not None:
        routers.append(("Faults", faults.router()))
        context.answer_counts.show(faults.collector)
    for tag, router in routers:
        app.include_router(router, tags=[tag])
    routes = RouteTable(route for _, router in routers for route in router.routes)
    add_error_handlers(app)
    # The middleware added last is the outermost. BodyLimit is outside of all that may answer without reading a body.
    answer = refused if config.fastdeploy_form else error_response
    policy = AccessPolicy.of(config, keys, routes)
    if faults is not None:
        app.add_middleware(faults.middleware, may_control=policy.check_control)
    app.add_middleware(Guard, check=policy.check, answer=answer)
    if config.allowed_origins:  # outside of the check of keys: browsers send preflight requests without a key
        origins, methods = config.allowed_origins, ("GET", "POST", "PUT", "DELETE")
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])
    app.add_middleware(Guard, check=PagePolicy.of(config).check)
    app.add_middleware(LastResort)
    app.add_middleware(BodyLimit, config=config, slice_lock=context.slice_lock)
    app.add_middleware(CountAnswers, counts=context.answer_counts)
    app.add_middleware(Routing)
    app.add_middleware(TraceId)
    return app


def docs_router(app: FastAPI) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/openapi.json")
    @RouteAccess.OPEN
    def openapi() -> Response:
        return json_response(app.openapi())

    @router.get("/docs")
    @RouteAccess.OPEN
    def docs() -> Response:
        return HTMLResponse(page(app.openapi()))

    return router


def _end_process(connecting: asyncio.Task[None]) -> None:
    """End this process when its connection to the engine has failed for good. The supervisor starts another one."""
    if not connecting.cancelled():
        logger.error("the connection to the engine failed for good", exc_info=connecting.exception())
        os.kill(os.getpid(), signal.SIGTERM)


EVENT_STREAMS = ("/ui/events",)  # streams that GET opens


class Guard:
    """Middleware that answers the error that ``check`` returns for a request, without reading the body of the
    request. answer: makes the answer."""

    def __init__(
        self,
        app: ASGIApp,
        check: Callable[[Scope], FastDeployError | None],
        answer: Callable[[FastDeployError], Response] = error_response,
    ):
        self._app = app
        self._check = check
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        await (self._answer(error) if error else self._app)(scope, receive, send)


class Routing:
    """Middleware that serves /path/ as /path, and HEAD as GET. A redirect to /path would lose the body of the request.
    The HTTP server sends no body in the answer to a HEAD request. HEAD of an event stream is not served (405): its
    answer would not end before the stream, and the next request on the connection would wait."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/") or "/"
            as_get = scope["method"] == "HEAD" and path not in EVENT_STREAMS
            scope = {**scope, "path": path, "method": "GET" if as_get else scope["method"]}
        await self._app(scope, receive, send)


class LastResort:
    """Middleware that answers an unexpected exception with a JSON error, so that the connection stays open."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        def watched_send(message: Message) -> Awaitable[None]:
            nonlocal started
            started = True
            return send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            return
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await error_response(error)(scope, receive, send)


class TraceId:
    """Middleware that copies X-Request-Id from the request to the response, so that a service mesh can match them."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = next((value for name, value in scope.get("headers", ()) if name == b"x-request-id"), None)
        if trace is None:
            await self._app(scope, receive, send)
            return

        def traced_send(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", trace)]
            return send(message)

        await self._app(scope, receive, traced_send)
