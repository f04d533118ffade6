"""The requests of an agent: chats and completions whose turns a session remembers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from fastdeploy.client.choice import Choice
from fastdeploy.client.turns import KnownTurn
from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import MAX_SESSION_CHARS, parse_body, read_generation, read_json
from fastdeploy.http.context import ServingContext
from fastdeploy.http.guards.keys import Keys
from fastdeploy.http.guards.route_access import bearer_key
from fastdeploy.http.openai import chat_prompt, completion
from fastdeploy.http.openai.chat import ChatView
from fastdeploy.http.openai.protocol import UNSUPPORTED, ChatBody, GenerationBody
from fastdeploy.http.sessions.messages import MessagesReply
from fastdeploy.http.sessions.messages_body import UNSUPPORTED as REFUSED
from fastdeploy.http.sessions.messages_body import CountBody, MessagesBody, anthropic_names, chat_of
from fastdeploy.http.sessions.recognition import chain_of, chain_with
from fastdeploy.http.sessions.recording import RecordedGeneration
from fastdeploy.http.sessions.store import SessionStore, owner_of
from fastdeploy.http.sessions.turns_table import FoundTurn

NAME = re.compile(r"[A-Za-z0-9._:@~=+-]+")
Body = TypeVar("Body", bound=GenerationBody)
ENGINE_S = 60.0  # for which a request waits for an engine
SHOWN = ("message", "tool_call_errors")  # of a choice, in a turn
# Why a turn begins with no ids of an earlier turn.
FIRST, UNKNOWN, REWRITTEN = "first turn", "its messages continue no earlier turn", "the chat template rewrites turns"


def session_name(request: Request) -> str:
    """Return the name of the session in the path of ``request``. Raises InvalidField."""
    name = request.path_params["session"]
    if len(name) > MAX_SESSION_CHARS or not NAME.fullmatch(name):
        raise InvalidField("session", f"expected 1 to {MAX_SESSION_CHARS} letters, digits, and . _ : @ ~ = + -")
    return name


class Agents:
    """Answers the requests of agents, by session. keys: of this server."""

    def __init__(self, context: ServingContext, store: SessionStore, keys: Keys):
        self.context = context
        self.store = store
        self._keys = keys

    def owner(self, request: Request) -> bytes:
        """Return who sends ``request``: the owner of the sessions that the request may see."""
        return owner_of(bearer_key(request.scope["headers"]) if self._keys.data else None)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        return (await self.chat_view(request, await read_generation(request))).response()

    async def chat_view(self, request: Request, data: dict[str, Any]) -> ChatView:
        """Return the reply to a chat with the fields ``data``, which has not begun yet."""
        body = _checked(parse_body(data, ChatBody, UNSUPPORTED))
        chain = await asyncio.to_thread(chain_of, data, data["messages"])
        session, found = await self.store.begin(self.owner(request), session_name(request), chain[:-1])
        await self._engine()
        known = None if found is None else KnownTurn(found.num_messages, found.ids)
        checked = await chat_prompt.prepare(self.context, body, known)
        begun = data["messages"][-1] if body.continue_final_message else None
        about = _beginning(found, checked.requests[0].prompt_token_ids, session.num_turns)

        async def show(index: int, choice: Choice) -> tuple[dict[str, Any], bytes | None]:
            view = ChatView(self.context, generation, body.model_copy(update={"logprobs": None}))
            made = await view.choice(index, choice)
            return {name: made[name] for name in SHOWN if name in made}, chain_with(chain, made["message"], begun)

        generation = RecordedGeneration(self.context, self.store, checked, session.uid, show, about)
        return ChatView(self.context, generation, body)

    async def message(self, request: Request) -> Response:
        """Answer a message of Anthropic's."""
        body = parse_body(await read_json(request), MessagesBody, REFUSED)
        with anthropic_names():
            view = await self.chat_view(request, chat_of(body))
        return MessagesReply(self.context, view, bool(body.stream)).response()

    async def count_tokens(self, request: Request) -> int:
        """Return the number of tokens that the prompt of a message has."""
        session_name(request)
        body = parse_body(await read_json(request), CountBody, REFUSED)
        with anthropic_names():
            chat = parse_body(chat_of(body), ChatBody, UNSUPPORTED)
            return len((await chat_prompt.prepare(self.context, chat)).requests[0].prompt_token_ids)

    async def complete(self, request: Request) -> Response:
        """Answer a completion. Its turn continues the turn whose ids begin its prompt."""
        body = _checked(completion.parse_completion(await read_generation(request)))
        session, _ = await self.store.begin(self.owner(request), session_name(request))
        await self._engine()
        checked = await completion.prepare(self.context, body, completion.DEFAULT_MAX_TOKENS)

        async def show(index: int, choice: Choice) -> tuple[dict[str, Any], bytes | None]:
            return {"text": choice.text}, None

        generation = RecordedGeneration(self.context, self.store, checked, session.uid, show, {})
        return completion.CompletionView(self.context, generation, body).response()

    async def _engine(self) -> None:
        """Wait for the engine, which may be replaced at this moment. Raises EngineDead if it does not come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENGINE_S):
                await self.context.client.connected.wait()
        await self.context.client.require_engine()


def _checked(body: Body) -> Body:
    """Return ``body``. An agent gets the routing of tokens only if it asks. Raises InvalidField for a field that a
    session has no use for."""
    if body.request_fields.retain_s:
        raise InvalidField("retain_s", "expected none in a session that remembers: its turns are kept")
    return body if body.routed_experts else body.model_copy(update={"routed_experts": False})


def _beginning(found: FoundTurn | None, prompt: list[int], num_turns: int) -> dict[str, Any]:
    """Return what a turn says of the earlier turn that it continues."""
    if found is None:
        return {"continues": None, "begins_anew": UNKNOWN if num_turns else FIRST}
    if prompt[: len(found.ids)] != found.ids:
        return {"continues": None, "begins_anew": REWRITTEN}
    return {"continues": found.number, "begins_anew": None}
