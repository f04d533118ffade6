"""A pytest plugin: SkyRL's tests of its client get a front of our server where they start a mock of a vLLM server.

A front passes each request on to our server. The mock's own routes /test/..., which tell a test what the mock has
seen, are answered from the requests that passed. As the mock does, a front serves under any model name, and adds to the
reply of a control call what the call said: the tests read there that each server got the call of the client.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

URL = os.environ["FASTDEPLOY_URL"]
LIMIT_S = 60
# The mock's record of a model -> the routes whose model it is.
MODELS = {
    "generate": ("/inference/v1/generate", "/skyrl/v1/generate"),
    "chat": ("/v1/chat/completions",),
    "completion": ("/v1/completions",),
    "render": ("/v1/chat/completions/render",),
}


CONTROL = ("/pause", "/sleep", "/wake_up", "/reset_prefix_cache")
GENERATION = {path for paths in MODELS.values() for path in paths}


def said(request: Request, body: Any) -> dict[str, Any]:
    """Return what a control call said, as the mock tells it."""
    query = request.query_params
    level = {"level": int(query["level"])} if "level" in query else {}
    modes = {name: query[name] for name in ("mode", "clear_cache") if name in query}
    return {"tags": query.getlist("tags") or None, "body": body, **level, **modes}


class Seen:
    """What one front has seen."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = dict.fromkeys(MODELS)
        self.features: Any = None
        self.finished: list[str] = []
        self.adapters: dict[str, str] = {}
        self.num_world_size = 0

    def note(self, request: Request, body: Any, status: int) -> None:
        path = request.url.path
        for kind, paths in MODELS.items():
            if path in paths:
                self.models[kind] = body.get("model")
        if path in MODELS["generate"]:
            self.features = body.get("features")
        self.num_world_size += path == "/get_world_size"
        if path == "/finish_session":
            self.finished.append(request.query_params["session_id"])
        if status == 200 and path.endswith("/unload_lora_adapter"):
            self.adapters.pop(body["lora_name"], None)
        elif status == 200 and path.endswith("/load_lora_adapter"):
            self.adapters[body["lora_name"]] = body["lora_path"]

    def told(self, name: str) -> dict[str, Any]:
        """Return what the mock's route /test/NAME tells."""
        return {
            "last_generate_features": {"features": self.features},
            "last_models": self.models,
            "lora_registry": {"registry": self.adapters},
            "finished": {"finished": self.finished},
            "world_size_calls": {"count": self.num_world_size},
        }[name]


def front(server_id: int) -> FastAPI:
    """Return an application that passes requests on to our server."""
    app, seen = FastAPI(), Seen()

    @app.get("/test/{name}")
    async def test(name: str) -> Any:
        return seen.told(name)

    @app.api_route("{path:path}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> Response:
        content = await request.body()
        body = json.loads(content) if content else {}
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
            if path in GENERATION and "model" in body:
                content = json.dumps({name: value for name, value in body.items() if name != "model"}).encode()
            target = httpx.URL(URL + path, query=request.url.query.encode())
            reply = await client.request(request.method, target, content=content, headers=headers)
        seen.note(request, body, reply.status_code)
        if path in CONTROL and reply.status_code == 200:
            return JSONResponse({**reply.json(), **said(request, body)})
        return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))

    return app


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, "create_mock_vllm_server"):
            module.create_mock_vllm_server = front
