"""vLLM's routes between text and token ids: /tokenize, /detokenize, /v1/chat/completions/render.

``model`` is not looked up in the engine: every adapter has the tokenizer of the base model."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import PlainValidator
from starlette.responses import Response

from fastdeploy.core.errors import ContextLengthExceeded, InvalidField
from fastdeploy.http.body import LaxBody, parse_body, parse_json
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import read_control
from fastdeploy.http.errors import json_response
from fastdeploy.http.openai.chat import prepare
from fastdeploy.http.openai.protocol import UNSUPPORTED, ChatBody
from fastdeploy.http.openapi import described, takes


class TokenizeBody(LaxBody):
    """messages: a conversation, which is rendered and tokenised as by /v1/chat/completions."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


def _as_list(value: Any) -> list[Any]:
    """Check the type of the list alone. The route checks the ids after it has checked how many there are."""
    if not isinstance(value, list):
        raise ValueError("expected a list of token ids")
    return value


class DetokenizeBody(LaxBody):
    model: str | None = None
    tokens: Annotated[Any, PlainValidator(_as_list), described(list[int])]
    skip_special_tokens: bool = False


# Fields of a chat body that its tokens depend on.
RENDERED = frozenset({"model", "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
                      "chat_template", "tools", "documents", "mm_processor_kwargs"})  # fmt: skip
# Fields of a chat body that are sampling parameters.
SAMPLING = frozenset({"n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
                      "stop_token_ids", "repetition_penalty", "presence_penalty", "frequency_penalty",
                      "ignore_eos"})  # fmt: skip


def add_routes(router: APIRouter, context: ServingContext) -> None:
    @router.post("/tokenize", openapi_extra=takes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = await read_control(request, TokenizeBody)
        if body.messages is not None:
            data = parse_json(await request.body())
            ids = await rendered(context, {k: v for k, v in data.items() if k in RENDERED})
        elif body.prompt is not None:
            context.check_text(body.prompt, "prompt")
            ids = await context.require_tokenizer("prompt").encode(body.prompt, body.add_special_tokens)
        else:
            raise InvalidField("prompt", "expected a prompt or messages")
        reply = {"count": len(ids), "max_model_len": context.max_model_len, "tokens": ids, "token_strs": None}
        if body.return_token_strs:
            tokenizer = context.require_tokenizer("return_token_strs")
            reply["token_strs"] = await context.pace().array(map(tokenizer.token_text, ids))
        return json_response(reply)

    @router.post("/detokenize", openapi_extra=takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Decode at most a full context of tokens, since decoding blocks the event loop. No tokens give an empty text:
        a request that was aborted at once has none."""
        body = await read_control(request, DetokenizeBody)
        tokenizer = context.require_tokenizer("tokens")
        if len(body.tokens) > context.max_model_len:
            raise ContextLengthExceeded("tokens", context.max_model_len, f"the text of {len(body.tokens)} tokens")
        if any(type(token) is not int for token in body.tokens):
            raise InvalidField("tokens", "expected a list of token ids")
        if body.tokens:
            context.check_vocabulary(body.tokens, "tokens")
        return json_response({"prompt": tokenizer.decode(body.tokens, body.skip_special_tokens)})

    @router.post("/v1/chat/completions/render", openapi_extra=takes(ChatBody))
    async def render(request: Request) -> Response:
        """Answer with the prompt of /v1/chat/completions as token ids, in a body for /inference/v1/generate."""
        data = parse_json(await request.body())
        ids = await rendered(context, data)
        return json_response(
            {
                "request_id": data.get("request_id"),
                "model": context.model_name(context.adapter(data.get("model"))),
                "token_ids": ids,
                "features": None,
                "sampling_params": {k: data[k] for k in SAMPLING & data.keys()},
            }
        )


async def rendered(context: ServingContext, data: dict[str, Any]) -> list[int]:
    """Return the token ids of a conversation. Tools are rendered whatever tool_choice is, since no tool call is
    generated."""
    body = parse_body({**data, "tool_choice": "none"}, ChatBody, UNSUPPORTED)
    return (await prepare(context, body)).requests[0].prompt_token_ids
