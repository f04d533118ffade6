"""The HTTP application of one API server: its routes, middleware and error handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.process import VERSION
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import adapters_router
from fastdeploy.http.control.health import health_router
from fastdeploy.http.control.pause import control_router
from fastdeploy.http.control.weights import weights_router
from fastdeploy.http.dialects.areal import areal_router
from fastdeploy.http.dialects.sglang.routes import sglang_router
from fastdeploy.http.dialects.skyrl.routes import skyrl_router
from fastdeploy.http.dialects.vllm.routes import vllm_router
from fastdeploy.http.errors import add_error_handlers, json_response
from fastdeploy.http.fleet.routes import fleet_router, spool_router
from fastdeploy.http.guards.body_limit import BodyLimit
from fastdeploy.http.guards.browser_guard import PagePolicy
from fastdeploy.http.guards.budget import Budget
from fastdeploy.http.guards.keys import NO_KEYS, Keys
from fastdeploy.http.guards.route_access import AccessPolicy, RouteAccess, RouteTable
from fastdeploy.http.middleware import Guard, LastResort, Routing, TraceId
from fastdeploy.http.openai.chat import chat_router
from fastdeploy.http.openai.completion import completion_router
from fastdeploy.http.openapi import DescribedApp, page
from fastdeploy.http.ui.feed import ui_router
from fastdeploy.http.upload import remove_leftovers

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


def create_app(
    client: ServingClient, tokenizer: Tokenizer | None, config: ServeConfig, keys: Keys = NO_KEYS
) -> FastAPI:
    """Return the HTTP application. Its start starts ``client``, and its end closes ``client``."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        remove_leftovers(config)
        client.start().add_done_callback(_end_process)
        yield
        await client.close()

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
    routers += [("", docs_router(app)), ("", ui_router(client))]
    for tag, router in routers:
        app.include_router(router, tags=[tag])
    routes = RouteTable(route for _, router in routers for route in router.routes)
    add_error_handlers(app)
    # The middleware added last is the outermost. BodyLimit is outside of all that may answer without reading a body.
    app.add_middleware(Guard, check=AccessPolicy.of(config, keys, routes).check)
    if config.allowed_origins:  # outside of the check of keys: browsers send preflight requests without a key
        origins, methods = config.allowed_origins, ("GET", "POST", "PUT")
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])
    app.add_middleware(Guard, check=PagePolicy.of(config).check)
    app.add_middleware(LastResort)
    app.add_middleware(BodyLimit, config=config, slice_lock=context.slice_lock)
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
