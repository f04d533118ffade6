"""The app of one API server, and its process: ``python -m fastdeploy.entrypoints.api_server``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from fastdeploy import __version__
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.tokenizer import Tokenizer, load_tokenizer
from fastdeploy.core.collector import collect_rarely
from fastdeploy.core.config import ServeConfig, from_json
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.logger import setup_logging
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.health import health_router
from fastdeploy.http.control.pause import control_router
from fastdeploy.http.control.weights import weights_router
from fastdeploy.http.dialects.areal.routes import areal_router
from fastdeploy.http.dialects.sglang.routes import sglang_router
from fastdeploy.http.dialects.skyrl.routes import skyrl_router
from fastdeploy.http.dialects.vllm.routes import vllm_router
from fastdeploy.http.docs_page import add_docs_page
from fastdeploy.http.errors import add_error_handlers
from fastdeploy.http.guards import browser_guard, route_access
from fastdeploy.http.guards.body_limit import BodyLimit
from fastdeploy.http.guards.budget import Budget
from fastdeploy.http.guards.connection_limits import HttpProtocol
from fastdeploy.http.guards.keys import NO_KEYS, Keys, take_keys
from fastdeploy.http.middleware import LastResort, Routing, TraceId
from fastdeploy.http.openai.serving_chat import chat_router
from fastdeploy.http.openai.serving_completion import completion_router
from fastdeploy.http.openapi import describe
from fastdeploy.http.upload import remove_leftovers
from fastdeploy.inter_communicator.event_pipe import EventPipe

logger = logging.getLogger(__name__)
BACKLOG = 4096
# The groups of routes, in the order of /docs.
ROUTERS = {
    "OpenAI": (completion_router, chat_router),
    "Control": (control_router,),
    "Weights": (weights_router,),
    "Operation": (health_router,),
    "vLLM": (vllm_router,),
    "SkyRL": (skyrl_router,),
    "SGLang": (sglang_router,),
    "AReaL": (areal_router,),
}


def create_app(client: EngineClient, tokenizer: Tokenizer | None, config: ServeConfig, keys: Keys = NO_KEYS) -> FastAPI:
    """Make the HTTP application. It starts and closes ``client`` with its own life."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        remove_leftovers(config)
        client.start()
        yield
        await client.close()

    app = FastAPI(
        title="FastDeploy",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    uploads = Budget(config.max_uploads, config.body_idle_s, "the weight uploads at once (--max-uploads)")
    context = ServingContext(client, tokenizer, config, uploads)
    for tag, routers in ROUTERS.items():
        for router in routers:
            app.include_router(router(context), tags=[tag])
    describe(app)
    add_docs_page(app)
    add_error_handlers(app)
    # The last one is the outermost. BodyLimit is around all that may answer without reading a body.
    app.add_middleware(route_access.AccessControl, policy=route_access.AccessPolicy.of(config, keys))
    if config.allowed_origins:  # around the check of keys: a browser asks for permission without a key
        origins, methods = config.allowed_origins, ("GET", "POST", "PUT")
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])
    app.add_middleware(browser_guard.BrowserGuard, policy=browser_guard.PagePolicy.of(config))
    app.add_middleware(LastResort)
    app.add_middleware(BodyLimit, config=config, turn=context.turn)
    app.add_middleware(Routing)
    app.add_middleware(TraceId)
    return app


class ApiServer(uvicorn.Server):
    """Ends its open requests with what they have before it waits for their connections to close."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, bound_s: float):
        super().__init__(config)
        self._client = client
        self._bound_s = bound_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        aborting = asyncio.create_task(self._client.abort_open(self._bound_s))
        await super().shutdown(sockets)
        await aborting


def make_server(
    client: EngineClient, tokenizer: Tokenizer | None, config: ServeConfig, keys: Keys = NO_KEYS
) -> ApiServer:
    """A uvicorn server of :func:`create_app`; half of the shutdown time is for the engine to end open requests."""
    uvicorn_config = uvicorn.Config(
        create_app(client, tokenizer, config, keys),
        loop="uvloop",
        http=functools.partial(HttpProtocol, config),
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=config.http_keepalive_s,
        timeout_graceful_shutdown=max(1, round(config.shutdown_s / 2)),
        log_config=None,
        access_log=False,
        server_header=False,
    )
    return ApiServer(uvicorn_config, client, bound_s=config.shutdown_s / 4)


async def serve(
    config: ServeConfig,
    keys: Keys,
    tokenizer: Tokenizer | None,
    endpoint: str,
    listeners: Sequence[socket.socket],
    events: EventPipe,
) -> None:
    client = EngineClient(endpoint, config.stall_s)
    server = make_server(client, tokenizer, config, keys)
    announce = asyncio.create_task(_announce(client, events))
    collect_rarely()
    await server.serve(sockets=list(listeners))
    announce.cancel()


async def _announce(client: EngineClient, events: EventPipe) -> None:
    events.send("up")
    await client.connected.wait()
    events.send("ready", boot_id=client.welcome.boot_id)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="ServeConfig as JSON")
    parser.add_argument("--endpoint", required=True, help="ZMQ address of the engine")
    parser.add_argument("--http-fds", type=int, nargs="+", required=True, help="the listening sockets, inherited")
    parser.add_argument("--event-fd", type=int, required=True, help="where to tell the supervisor, inherited")
    args = parser.parse_args()
    setup_logging("api")
    listeners = [socket.socket(fileno=fd) for fd in args.http_fds]
    config, keys, events = from_json(args.config, ServeConfig), take_keys(os.environ), EventPipe(args.event_fd)
    try:
        tokenizer = load_tokenizer(config.model)
    except InvalidField as error:
        return events.refuse(error)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(serve(config, keys, tokenizer, args.endpoint, listeners, events))
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


if __name__ == "__main__":
    sys.exit(main())
