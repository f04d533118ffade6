"""vLLM's /sleep, /wake_up and /is_sleeping. A sleep while asleep, or a wake-up while awake, is no error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator
from starlette.responses import Response

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import LaxBody
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import PAUSE_TIMEOUT_S, Routes
from fastdeploy.http.errors import json_response
from fastdeploy.inter_communicator import messages as m

# vLLM's names of memory -> our names.
TAGS = {"weights": "weight", "weight": "weight", "kv_cache": "kv_cache"}
EVERYTHING = ("weight", "kv_cache")


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class TagsBody(LaxBody):
    tags: Annotated[list[str], BeforeValidator(_as_list)] = []

    def ours(self) -> tuple[str, ...]:
        """Return our names of the tags. No tags means all memory."""
        for tag in self.tags:
            if tag not in TAGS:
                raise InvalidField("tags", f"expected some of weights, kv_cache, got {tag!r}")
        return tuple(dict.fromkeys(TAGS[tag] for tag in self.tags)) or EVERYTHING


class SleepBody(TagsBody):
    """level: 1 keeps the weights outside of the engine's memory. 2 drops the weights, which must be published again.
    mode: mode of the pause that a sleep implies."""

    level: int = 1
    mode: Literal["abort", "wait", "keep"] | None = None


def add_routes(router: APIRouter, context: ServingContext) -> None:
    client, routes = context.client, Routes(router)

    async def asleep() -> set[str]:
        return set((await client.call(m.WeightInfoArgs()))["asleep"])

    @routes.post("/sleep", SleepBody)
    async def sleep(body: SleepBody) -> dict[str, Any]:
        if body.level not in (1, 2):
            raise InvalidField("level", f"expected 1 or 2, got {body.level}")
        sleeping = await asleep()
        tags = tuple(tag for tag in body.ours() if tag not in sleeping)
        if not tags:
            return {"status": "sleeping", "asleep": sorted(sleeping)}
        mode, discard = body.mode or context.config.vllm_pause_mode, body.level == 2 and "weight" in tags
        args = m.SleepArgs(tags=tags, mode=mode, discard=discard, timeout_s=PAUSE_TIMEOUT_S)
        return {"status": "sleeping", **await client.call(args)}

    @routes.post("/wake_up", TagsBody)
    async def wake_up(body: TagsBody) -> dict[str, Any]:
        wanted, sleeping = body.ours(), await asleep()
        tags = tuple(tag for tag in wanted if tag in sleeping)
        if not tags:
            return {"status": "awake", "asleep": sorted(sleeping)}
        return {"status": "awake", **await client.call(m.WakeArgs(tags=tags))}

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        sleeping = await asleep()
        return json_response({"is_sleeping": bool(sleeping), "asleep": sorted(sleeping)})
