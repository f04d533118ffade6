"""The engine as the HTTP routes need it: offered by EngineClient for one engine, and by FleetClient for many."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from fastdeploy.client.request_stream import Reader, RequestStream
from fastdeploy.core.loading import Loading
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator import messages as m


class ServingClient(Protocol):
    """The calls and values that the HTTP routes use. EngineClient explains each of them."""

    connected: asyncio.Event
    closing: asyncio.Event
    welcome: m.Welcome | None
    model_info: dict[str, Any]

    @property
    def loading(self) -> Loading | None: ...

    @property
    def missing_because(self) -> str: ...

    @property
    def closed_because(self) -> str: ...

    def start(self) -> asyncio.Task[None]: ...

    async def close(self) -> None: ...

    async def require_engine(self) -> m.Welcome: ...

    async def submit(self, request: AddRequest, reader: Reader | None = None) -> RequestStream: ...

    async def call(self, args: m.Args) -> dict[str, Any]: ...

    async def abort_open(self, bound_s: float) -> None: ...
