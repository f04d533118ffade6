"""The routes of a server that was started with --fastdeploy-form, in place of the native ones: chats and completions,
sleep and wake-up, and the statuses while the weights are cleared."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.generation import Generation
from fastdeploy.core.errors import (
    STATUS,
    ContextLengthExceeded,
    FastDeployError,
    InvalidField,
    InvalidKey,
    QueueFull,
    ServerBusy,
)
from fastdeploy.http.body import parse_body, read_generation
from fastdeploy.http.calls import Route, Routes, catching, envelope, envelope_error, read
from fastdeploy.http.context import ServingContext
from fastdeploy.http.control.adapters import known_adapters
from fastdeploy.http.control.operation import health_of
from fastdeploy.http.control.protocol import SleepBody, WakeBody
from fastdeploy.http.dialects.fastdeploy.bodies import INVALID, RAW_PROMPT, TOKENS_PER_EVENT, Malformed, native
from fastdeploy.http.dialects.fastdeploy.replies import FastDeployChat, FastDeployCompletion
from fastdeploy.http.dialects.fastdeploy.weights import FolderWeights
from fastdeploy.http.errors import error_response, json_response
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openai import chat_prompt, completion
from fastdeploy.http.openai.protocol import UNSUPPORTED, ChatBody, GenerationBody
from fastdeploy.inter_communicator import messages as m

NOT_NORMAL = 304  # while the weights are not there. Such a reply has no body
NATIVE_SLEEP = frozenset({"mode", "discard"})  # fields that ask for a native sleep, which keeps the weights
FIELDS = {"input_ids": "prompt_token_ids"}  # native names of fields -> those that the client sent
# Seconds that requests wait for the first engine. FastDeploy listens when its engine is there, so scripts take an open
# port for a server that answers.
FIRST_ENGINE_S = 600.0
CHAT_ID, COMPLETION_ID = "chatcmpl-", "cmpl-"


def form_router(context: ServingContext, weights: FolderWeights) -> APIRouter:
    """Return the routes. They come before the native routes of the same paths."""
    router = APIRouter(include_in_schema=False)
    client = context.client

    first_engine = asyncio.Event()

    async def wait_for_first_engine() -> None:
        if not first_engine.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_ENGINE_S):
                    await client.connected.wait()
            first_engine.set()

    def while_normal(route: Route) -> Route:
        async def run(request: Request) -> Response:
            await wait_for_first_engine()
            return Response(status_code=NOT_NORMAL) if await weights.are_cleared() else await route(request)

        return run

    @router.post("/v1/chat/completions")
    @RouteAccess.DATA
    @catching(failed)
    @while_normal
    async def chat(request: Request) -> Response:
        fields, per_event = await fields_of(request, context, True)
        body = parse_body(fields, ChatBody, UNSUPPORTED)
        checked = await chat_prompt.prepare(context, await _of_a_model(context, body))
        generation = Generation(client, context.tokenizer, checked, context.pace(), tokens_per_delta=per_event)
        return FastDeployChat(context, generation, body).response()

    @router.post("/v1/completions")
    @RouteAccess.DATA
    @catching(failed)
    @while_normal
    async def completions(request: Request) -> Response:
        fields, per_event = await fields_of(request, context, False)
        body = completion.parse_completion(fields)
        checked = await completion.prepare(context, await _of_a_model(context, body), None)
        generation = Generation(client, context.tokenizer, checked, context.pace(), tokens_per_delta=per_event)
        return FastDeployCompletion(context, generation, body).response()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    @RouteAccess.OPEN
    @catching(lambda _: health_of(client))
    async def health(request: Request) -> Response:
        is_cleared = client.connected.is_set() and await weights.are_cleared()
        return Response(status_code=NOT_NORMAL) if is_cleared else health_of(client)

    calls = Routes(router, read, envelope, envelope_error)

    @calls.post("/v1/sleep", SleepBody)
    async def sleep(body: SleepBody) -> dict[str, Any]:
        """Give memory back, and refuse requests. The weights are not kept, unless a native field asks for it."""
        if body.model_fields_set & NATIVE_SLEEP:
            return await client.call(m.SleepArgs(**body.model_dump()))
        return await weights.clear(tuple(body.tags)) or {}

    @calls.post("/v1/wakeup", WakeBody)
    async def wakeup(body: WakeBody) -> dict[str, Any]:
        """Take memory again. When nothing sleeps any more, load the folder of the model, and resume."""
        if not await weights.are_cleared():
            return await client.call(m.WakeArgs(tuple(body.tags)))
        return await weights.load(tuple(body.tags)) or {}

    return router


async def fields_of(request: Request, context: ServingContext, is_chat: bool) -> tuple[dict[str, Any], int | None]:
    """Return the native fields of a body, whose request_id is one of FastDeploy's; and the largest number of tokens in
    an event, None for a whole reply. Clients read the first token of each event, and count events."""
    data = native(context, await read_generation(request), is_chat)
    if RAW_PROMPT in data:
        data["input_ids"] = await context.encode(data.pop(RAW_PROMPT), "messages.0.content")
    prefix = CHAT_ID if is_chat else COMPLETION_ID
    if (name := data.get("request_id")) and not name.startswith(prefix):
        data["request_id"] = prefix + name
    per_event = max(data.pop(TOKENS_PER_EVENT, 1), 1)
    return data, per_event if data.get("stream") else None


async def _of_a_model(context: ServingContext, body: Any) -> Any:
    """Return ``body``. A name that no adapter has is the base model, since FastDeploy does not check names."""
    adapter = context.adapter(body.model) if isinstance(body, GenerationBody) else ""
    if adapter and all(adapter != known["lora_name"] for known in await known_adapters(context)):
        return body.model_copy(update={"model": None})
    return body


def refused(error: FastDeployError) -> Response:
    """Return the answer to a request that the checks of access refuse: to a wrong key, FastDeploy's and vLLM's."""
    if isinstance(error, InvalidKey):
        return json_response({"error": "Unauthorized"}, error.status, {"WWW-Authenticate": "Bearer"})
    return error_response(error)


def failed(error: FastDeployError) -> Response:
    """Return the answer to a chat or a completion that is refused, in FastDeploy's words."""
    if isinstance(error, Malformed):
        shown = {"message": error.message, "type": "invalid_request_error", "code": error.code, **error.detail}
        return json_response({"error": shown}, error.status)
    if isinstance(error, QueueFull | ServerBusy):
        return error_response(error, detail=error.message)
    if isinstance(error, InvalidField):
        long = isinstance(error, ContextLengthExceeded)
        message = f"Input text is too long. {error.message}" if long else error.message
        field = FIELDS.get(error.field, error.field)
        code = error.code if long else INVALID
        shown = {"message": message.replace(f"{error.field}:", f"{field}:", 1), "code": code, "param": field}
        shown["type"] = "invalid_request_error"
        return json_response({"error": shown}, STATUS[error.code])
    return error_response(error)
