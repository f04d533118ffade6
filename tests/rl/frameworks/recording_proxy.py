"""A reverse proxy that records what a trainer sends, and keeps a copy of each adapter that the trainer loads."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from e2e.server import until
from fastdeploy.testing.process import free_port


@dataclass
class Recording:
    """url: of the proxy. calls: (path, query or body) of the control calls. completions: (body, reply) of each call of
    /v1/completions. adapters: a copy of each folder that was loaded, by the adapter's name."""

    url: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    completions: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    adapters: dict[str, Path] = field(default_factory=dict)


@contextlib.contextmanager
def recording_proxy(target: str, folder: Path) -> Iterator[Recording]:
    """Run a proxy before the server ``target``. Adapters are copied to ``folder``."""
    seen = Recording()
    client = httpx.AsyncClient(base_url=target, timeout=600)

    async def forward(request: Request) -> Response:
        content = await request.body()
        body = json.loads(content) if content else {}
        path = request.url.path
        if path == "/v1/load_lora_adapter":
            name = body["lora_name"]
            seen.adapters[name] = Path(shutil.copytree(body["lora_path"], folder / name))
        reply = await client.request(
            request.method,
            path,
            params=request.query_params,
            content=content,
            headers={"content-type": request.headers.get("content-type", "application/json")},
        )
        if path == "/v1/completions":
            seen.completions.append((body, reply.json()))
        elif request.method == "POST":
            seen.calls.append((path, body or dict(request.query_params)))
        return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))

    app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, 30, "the proxy answers")
    seen.url = f"http://127.0.0.1:{port}"
    try:
        yield seen
    finally:
        server.should_exit = True
        thread.join(30)
