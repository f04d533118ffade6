"""Ray Serve as a gateway: its proxy, and one actor that passes each stream on. Runs in an environment with ray[serve]
and aiohttp, as a script: ``python ray_serve.py --port N URL...``."""

from __future__ import annotations

import argparse
import itertools
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse


@serve.deployment(num_replicas=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class PassOn:
    """Passes requests on to servers in turn."""

    def __init__(self, urls: list[str]):
        self._urls = itertools.cycle(urls)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, request: Request) -> Response:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        if request.url.path == "/health":
            return Response()
        headers = {"content-type": "application/json"}
        target = next(self._urls) + request.url.path
        reply = await self._session.post(target, data=await request.body(), headers=headers)
        return StreamingResponse(self._pieces(reply), reply.status, media_type=reply.content_type)

    async def _pieces(self, reply: Any) -> AsyncIterator[bytes]:
        async with reply:
            async for piece in reply.content.iter_any():
                yield piece


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("urls", nargs="+")
    args = parser.parse_args()
    ray.init(address="local", include_dashboard=False, num_cpus=2, object_store_memory=100 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    deployment: Any = PassOn
    serve.run(deployment.bind(args.urls))
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    ray.shutdown()


if __name__ == "__main__":
    main()
