"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.choice import Choice, ChoiceDelta
from fastdeploy.client.generation import Generation
from fastdeploy.core.outputs import Logprob
from fastdeploy.http.body import parse_body, read_generation
from fastdeploy.http.context import ServingContext
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openai.chat_message import ReplyMessages
from fastdeploy.http.openai.chat_prompt import prepare
from fastdeploy.http.openai.known_turns import turn_fields
from fastdeploy.http.openai.meta_info import meta_info
from fastdeploy.http.openai.protocol import UNSUPPORTED, ChatBody, ChatTokensBody
from fastdeploy.http.openai.reply import ChosenToken, OpenAIReply, TokenLogprob, work_of
from fastdeploy.http.openapi import streams, takes
from fastdeploy.http.routed_experts import Form

CHARS_PER_WORK = 32  # to parse, in the units of Pace


def chat_router(context: ServingContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=takes(ChatBody), responses=streams())
    @RouteAccess.DATA
    async def chat_completions(request: Request) -> Response:
        return await answer(await read_generation(request), ChatBody)

    @router.post("/v1/chat/completions/tokens", openapi_extra=takes(ChatTokensBody), responses=streams())
    @RouteAccess.DATA
    async def chat_with_tokens(request: Request) -> Response:
        """Answer a chat whose prompt the client has tokenised, as prime-rl's server does. So the tokens of earlier
        turns stay those that the model sampled."""
        return await answer(await read_generation(request), ChatTokensBody)

    async def answer(data: dict[str, Any], kind: type[ChatBody]) -> Response:
        body = parse_body(data, kind, UNSUPPORTED)
        generation = Generation(context.client, context.tokenizer, await prepare(context, body), context.pace())
        return ChatView(context, generation, body).response()

    return router


class ChatView(OpenAIReply):
    _body: ChatBody
    kind, event_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, context: ServingContext, generation: Generation, body: ChatBody):
        super().__init__(context, generation, body)
        self._messages = ReplyMessages(context, generation, body)

    async def body(self) -> dict[str, Any]:
        """Return the reply. A chat has one prompt, so prompt_logprobs are at the top, as in vLLM's replies."""
        body = await super().body()
        first = body["choices"][0]
        if "prompt_logprobs" in first:
            body["prompt_logprobs"] = first.pop("prompt_logprobs")
        if self._body.return_token_ids:
            body["prompt_token_ids"] = self._prompt(0)
        return body

    async def choices(self) -> list[dict[str, Any]]:
        """Add what NeMo-RL reads of a message: its tokens, with log probabilities and names of tokens, and the routing.
        And SGLang's meta_info, which has the routing that sgl_ext has without it."""
        choices, body = await super().choices(), self._body
        for i, choice in enumerate(choices):
            if body.logprobs and body.return_tokens_as_token_ids:
                choice["message"] |= await turn_fields(self.generation, i)
            if self._routing_form is Form.NEMO_RL and "routed_experts" in choice:
                choice["message"]["routed_experts"] = choice.pop("routed_experts")
            if body.return_meta_info:
                choice["meta_info"] = await meta_info(self.generation, i, bool(body.logprobs), self._asks_mask)
                choice["meta_info"] |= choice.pop("sgl_ext", {})
        return choices

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message, more = self._messages.whole(index, choice)
        await self.generation.pace.spend(len(choice.text) // CHARS_PER_WORK)
        logprobs = await self._logprobs(choice.token_ids, choice.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, **more}

    async def events(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Return the event of ``delta``. If it ends an answer with a tool call, the end is an event of its own, since
        the ``openai`` package looks at finish_reason before it looks at the calls."""
        shown, more = self._messages.delta(index, delta)
        delta = delta._replace(finish_reason=self._messages.finish_reason(index, delta.finish_reason))
        if delta.finish_reason is None or "tool_calls" not in shown:
            return [await self._chunk(index, delta, shown, more)]
        end = ChoiceDelta(delta.first + len(delta.token_ids), "", [], [], [], delta.finish_reason)
        call = await self._chunk(index, delta._replace(finish_reason=None), shown, more)
        return [call, await self._chunk(index, end, {}, {})]

    async def _chunk(
        self, index: int, delta: ChoiceDelta, shown: dict[str, Any], more: dict[str, Any]
    ) -> dict[str, Any]:
        first = index not in self._seen
        logprobs = await self._logprobs(delta.token_ids, delta.logprobs)
        event = await self._event(index, delta, {"index": index, "delta": shown, "logprobs": logprobs, **more})
        return event | {"prompt_token_ids": self._prompt(0)} if first and self._body.return_token_ids else event

    async def _identity(self, index: int, choice: Choice) -> dict[str, Any]:
        fields = await super()._identity(index, choice)
        return fields | {"finish_reason": self._messages.finish_reason(index, choice.finish_reason)}

    async def _logprobs(self, ids: list[int], logprobs: list[Logprob]) -> dict[str, Any] | None:
        """Return OpenAI's list with one entry per token."""
        if not self._body.logprobs and not self._asks_ids:
            return None
        pairs = zip(ids, logprobs, strict=True)
        content = await self.generation.pace.array(map(self._token, pairs), work_of(logprobs))
        return {"content": content, "refusal": None}

    def _token(self, pair: tuple[int, Logprob]) -> ChosenToken:
        token_id, entry = pair
        text, spelled = self.token_text, self._context.require_tokenizer("messages").token_bytes
        top = [TokenLogprob(text(token), logprob, spelled(token)) for token, logprob in entry.top]
        return ChosenToken(text(token_id), entry.logprob, spelled(token_id), top)
