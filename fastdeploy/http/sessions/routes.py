"""The routes of sessions that remember: those of agents below /sessions/ID/v1, and those of trainers below
/v1/sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from fastdeploy.core.errors import FastDeployError
from fastdeploy.http.calls import catching
from fastdeploy.http.errors import error_response, json_response
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openai.protocol import ChatBody, CompletionBody
from fastdeploy.http.openapi import streams, takes
from fastdeploy.http.sessions.agents import Agents, session_name
from fastdeploy.http.sessions.messages_body import CountBody, MessagesBody
from fastdeploy.http.sessions.store import Session
from fastdeploy.http.sessions.trajectory import rows
from fastdeploy.http.sessions.turns_table import StoredTurn
from fastdeploy.inter_communicator import messages as m


def sessions_router(agents: Agents) -> APIRouter:
    router = APIRouter()
    store, client = agents.store, agents.context.client

    @router.post("/sessions/{session}/v1/chat/completions", openapi_extra=takes(ChatBody), responses=streams())
    @RouteAccess.DATA
    async def session_chat(request: Request) -> Response:
        """Answer a chat of an agent. Earlier turns of the session are recognised in the messages."""
        return await agents.chat(request)

    @router.post("/sessions/{session}/v1/completions", openapi_extra=takes(CompletionBody), responses=streams())
    @RouteAccess.DATA
    async def session_completion(request: Request) -> Response:
        """Answer a completion of an agent."""
        return await agents.complete(request)

    @router.post("/sessions/{session}/v1/messages", openapi_extra=takes(MessagesBody), responses=streams())
    @RouteAccess.DATA
    @catching(_anthropic_error)
    async def session_message(request: Request) -> Response:
        """Answer a message of an agent, as Anthropic's API does."""
        return await agents.message(request)

    @router.post("/sessions/{session}/v1/messages/count_tokens", openapi_extra=takes(CountBody))
    @RouteAccess.DATA
    @catching(_anthropic_error)
    async def session_count_tokens(request: Request) -> Response:
        """Count the tokens of the prompt of a message."""
        return json_response({"input_tokens": await agents.count_tokens(request)})

    @router.get("/v1/sessions")
    @RouteAccess.DATA
    async def sessions(request: Request) -> Response:
        """List the sessions of this key, those used last at first."""
        found, has_more = await store.sessions(agents.owner(request))
        return json_response({"object": "list", "data": [_shown(session) for session in found], "has_more": has_more})

    @router.get("/v1/sessions/{session}")
    @RouteAccess.DATA
    async def session_rows(request: Request) -> Response:
        """Return the trajectory of a session: one row of tokens for each leaf of its trees of turns."""
        session, turns = await store.read(agents.owner(request), session_name(request))
        return StreamingResponse(_document(session, turns), media_type="application/json")

    @router.delete("/v1/sessions/{session}")
    @RouteAccess.DATA
    async def end_session(request: Request) -> Response:
        """Abort the requests of a session that run, and forget the session."""
        owner, name = agents.owner(request), session_name(request)
        session = await store.find(owner, name)
        aborted = (await client.call(m.AbortArgs(session=session.uid)))["aborted"]
        await store.end(owner, name)
        return json_response({**_shown(session), "deleted": True, "aborted": aborted})

    @router.post("/v1/sessions/{session}/abort")
    @RouteAccess.DATA
    async def abort_session(request: Request) -> Response:
        """Abort the requests of a session that run. Their clients get the tokens so far, with finish_reason "abort"."""
        session = await store.find(agents.owner(request), session_name(request))
        aborted = (await client.call(m.AbortArgs(session=session.uid)))["aborted"]
        return json_response({**_shown(session), "aborted": aborted})

    return router


def _anthropic_error(error: FastDeployError) -> Response:
    return error_response(error, type="error")


def _shown(session: Session) -> dict[str, Any]:
    fields = session._asdict()
    del fields["uid"]
    return {"object": "session", "id": fields.pop("name"), **fields}


async def _document(session: Session, turns: list[StoredTurn]) -> AsyncIterator[bytes]:
    """Yield the JSON of a trajectory, a row at a time. The rows are made on a thread."""
    head = msgspec.json.encode({**_shown(session), "num_turns": len(turns)})
    yield head[:-1] + b',"rows":['
    made, first = rows(turns), True
    while (row := await asyncio.to_thread(_next_row, made)) is not None:
        yield row if first else b"," + row
        first = False
    yield b"]}"


def _next_row(made: Any) -> bytes | None:
    row = next(made, None)
    return None if row is None else msgspec.json.encode(row)
