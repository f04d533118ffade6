"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.choice import Choice, ChoiceDelta
from fastdeploy.client.generation import Generation, GenerationRequest
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.outputs import Logprob
from fastdeploy.http.body import parse_body, parse_json, read_generation
from fastdeploy.http.context import ServingContext
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openai.protocol import (
    UNSUPPORTED,
    ChatBody,
    ChatMessage,
    ChatTokensBody,
    generation_request,
    sampling_of,
    text_options,
)
from fastdeploy.http.openai.reply import ChosenToken, OpenAIReply, TokenLogprob, work_of
from fastdeploy.http.openapi import streams, takes


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


async def prepare(context: ServingContext, body: ChatBody) -> GenerationRequest:
    """Check ``body``, and make its prompt. Raises InvalidField or ModelNotFound."""
    arrived = time.time()
    adapter = context.adapter(body.model)
    await context.client.require_engine()
    tokenizer = context.require_tokenizer("messages")
    context.check_choices(1, body.request_fields.n)
    _check_template(context, body)
    messages = [_message(i, message) for i, message in enumerate(body.messages)]
    if isinstance(body, ChatTokensBody):
        ids = context.check_prompt(body.tokens, "tokens", "a list of token ids")
    else:
        ids = await _rendered(context, tokenizer, body, messages)
    limit = ("max_completion_tokens", body.max_completion_tokens)
    if body.max_completion_tokens is None:
        limit = ("max_tokens", body.max_tokens)
    sampling = sampling_of(context, body, len(ids), _logprobs_asked(body), limit)
    context.check_reply([sampling], [ids], body.request_fields.n)
    return generation_request(body, "chatcmpl", [ids], [sampling], text_options(context, body), arrived, adapter)


async def _rendered(
    context: ServingContext, tokenizer: Tokenizer, body: ChatBody, messages: list[dict[str, Any]]
) -> list[int]:
    """Apply the chat template and tokenise."""
    continue_final = bool(body.continue_final_message)
    context.check_length(sum(len(message["content"]) for message in messages), "messages")
    text = await tokenizer.chat_text(
        messages,
        add_generation_prompt=not continue_final if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continue_final,
        variables=body.chat_template_kwargs or {},
        tools=body.tools or None,
        template=body.chat_template,
    )
    return context.check_prompt(await context.encode(text, "messages", bool(body.add_special_tokens)), "messages")


def _check_template(context: ServingContext, body: ChatBody) -> None:
    """Raise InvalidField for tools whose calls would have to be parsed from the answer, and for the template of an
    untrusted client: a template is a program that may run without end."""
    if body.tools and body.tool_choice != "none":
        why = 'this server parses no tool calls; with tool_choice "none" tools are rendered into the prompt'
        raise InvalidField("tools", why)
    if body.chat_template is not None and not context.config.trust_request_chat_template:
        raise InvalidField("chat_template", "refused: this server was started without --trust-request-chat-template")


def _logprobs_asked(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidField("top_logprobs", "needs logprobs: true")
    return None


def _message(i: int, message: ChatMessage) -> dict[str, Any]:
    """Return the message with its content as one string. Text parts are joined, and other parts are refused."""
    content = message.content
    if isinstance(content, list):
        for k, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise InvalidField(f"messages.{i}.content.{k}", "only text parts are supported by this server")
        content = "".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise InvalidField(f"messages.{i}.content", "expected a string or a list of text parts")
    fields = {**message.model_dump(exclude_none=True), "content": content or ""}
    if "tool_calls" in fields:
        fields["tool_calls"] = _with_objects(fields["tool_calls"])
    return fields


def _with_objects(calls: Any) -> Any:
    """Return tool calls with their arguments as objects, which templates expect. OpenAI's clients send the arguments as
    JSON in a string. Other values stay unchanged."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(InvalidField):
                function["arguments"] = parse_json(function["arguments"].encode(errors="replace"))
    return calls


class ChatView(OpenAIReply):
    _body: ChatBody
    kind, event_kind = "chat.completion", "chat.completion.chunk"

    async def body(self) -> dict[str, Any]:
        """Return the reply. A chat has one prompt, so prompt_logprobs are at the top, as in vLLM's replies."""
        body = await super().body()
        first = body["choices"][0]
        if "prompt_logprobs" in first:
            body["prompt_logprobs"] = first.pop("prompt_logprobs")
        if self._body.return_token_ids:
            body["prompt_token_ids"] = self._prompt(0)
        return body

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text}
        return {"index": index, "message": message, "logprobs": await self._logprobs(choice.token_ids, choice.logprobs)}

    async def events(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        shown = {"content": delta.text}
        if index not in self._seen:
            shown = {"role": "assistant", "content": delta.text}
        logprobs = await self._logprobs(delta.token_ids, delta.logprobs)
        return [await self._event(index, delta, {"index": index, "delta": shown, "logprobs": logprobs})]

    async def _logprobs(self, ids: list[int], logprobs: list[Logprob]) -> dict[str, Any] | None:
        """Return OpenAI's list with one entry per token."""
        if not self._body.logprobs:
            return None
        pairs = zip(ids, logprobs, strict=True)
        content = await self.generation.pace.array(map(self._token, pairs), work_of(logprobs))
        return {"content": content, "refusal": None}

    def _token(self, pair: tuple[int, Logprob]) -> ChosenToken:
        token_id, entry = pair
        text, spelled = self.token_text, self._context.require_tokenizer("messages").token_bytes
        top = [TokenLogprob(text(token), logprob, spelled(token)) for token, logprob in entry.top]
        return ChosenToken(text(token_id), entry.logprob, spelled(token_id), top)
