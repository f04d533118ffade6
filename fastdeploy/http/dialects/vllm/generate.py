"""vLLM's routes that turn text to tokens and back, and POST /inference/v1/generate: token ids in, token ids out, whole
or as a stream. Its body is translated to the body of a completion, which is checked and run like any other completion.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import PlainValidator
from starlette.responses import Response

from fastdeploy.client.choice import Choice, ChoiceDelta
from fastdeploy.client.generation import Generation
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import ContextLengthExceeded, InvalidField
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.request_fields import RequestFields, check_vocabulary
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.http.body import Body, LaxBody, given_fields, parse_body, parse_json, read_generation
from fastdeploy.http.calls import read_lenient
from fastdeploy.http.context import ServingContext
from fastdeploy.http.errors import json_response
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openai.chat_prompt import prepare as prepare_chat
from fastdeploy.http.openai.completion import prepare
from fastdeploy.http.openai.protocol import UNSUPPORTED, ChatBody, CompletionBody
from fastdeploy.http.openai.reply import ChosenToken, OpenAIReply, TokenLogprob, token_name, work_of
from fastdeploy.http.openapi import described, schema_of, streams, takes

# Fields outside of sampling_params that have the same name in a completion.
PASSED_ON = frozenset({"model", "request_id", "stream", "stream_options", *RequestFields.__struct_fields__}) - {"n"}
NOT_SAMPLING = frozenset({"prompt", "token_ids", "echo"}) | PASSED_ON
# Fields of vLLM's SamplingParams that change no token: how vLLM delivers outputs, and where it looks for prefixes.
HARMLESS_SAMPLING = frozenset({"output_kind", "flat_logprobs", "skip_reading_prefix_cache"})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "features": (None, {}),
    "kv_transfer_params": (None, {}),
    "lora_request": (None,),
    "mm_processor_kwargs": (None, {}),
}
NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "extra_args": (None, {}),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
}


def _token_ids(value: Any) -> list[int]:
    """Check that ``value`` is one prompt, by its first id. The other ids are checked with the prompt's length."""
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        raise ValueError("expected a list of at least one token id")
    return value


class GenerateBody(Body):
    token_ids: Annotated[Any, PlainValidator(_token_ids), described(list[int])]
    sampling_params: dict[str, Any] = {}


def generate_schema() -> dict[str, Any]:
    """Return the JSON schema of the whole body: GenerateBody, and the fields that it shares with a completion."""
    schema, completion = schema_of(GenerateBody), schema_of(CompletionBody)["properties"]
    sampling = {k: v for k, v in completion.items() if k not in NOT_SAMPLING}
    schema["properties"]["sampling_params"] = {"type": "object", "properties": sampling}
    schema["properties"] |= {k: v for k, v in completion.items() if k in PASSED_ON}
    return schema


def add_routes(router: APIRouter, context: ServingContext) -> None:
    @router.post("/inference/v1/generate", openapi_extra=takes(generate_schema()), responses=streams())
    @RouteAccess.DATA
    async def generate(request: Request) -> Response:
        """Generate from token ids. X-Session-ID names the session, for a fleet. Without max_tokens the limit is
        the rest of the context, as in vLLM on this route (not the 16 of its SamplingParams)."""
        body = with_mask(context.config, parse_generate(await read_generation(request)))
        checked = await prepare(context, body, default_max_tokens=None)
        generation = Generation(context.client, context.tokenizer, checked, context.pace())
        return GenerateView(context, generation, body).response()


def parse_generate(data: dict[str, Any]) -> CompletionBody:
    """Return the completion that ``data`` asks for. Raises InvalidField for a field that this server cannot honour."""
    passed = {field: data[field] for field in PASSED_ON & data.keys()}
    own = {field: value for field, value in data.items() if field not in PASSED_ON}
    body = parse_body(own, GenerateBody, UNSUPPORTED | NEUTRAL)
    sampling = {k: v for k, v in body.sampling_params.items() if v is not None and k not in HARMLESS_SAMPLING}
    for field in sampling.keys() & NOT_SAMPLING:
        raise InvalidField(f"sampling_params.{field}", "is no sampling parameter")
    asked = passed | sampling | {"prompt": body.token_ids, "return_token_ids": True, "return_tokens_as_token_ids": True}
    return parse_body(asked, CompletionBody, UNSUPPORTED | NEUTRAL_SAMPLING)


def with_mask(config: ServeConfig, body: CompletionBody) -> CompletionBody:
    """Return ``body`` with the sampling masks of --return-sampling-mask, unless any token can be drawn. Clients of vLLM
    cannot ask for them in the request."""
    given = given_fields(body, SamplingParams)
    limits = {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in given}
    if not config.return_sampling_mask or not SamplingParams(**limits).limits_tokens:
        return body
    asked = {"return_sampling_mask": True, "return_sampling_mask_logprobs": config.return_sampling_mask_logprobs}
    return body.model_copy(update=asked)


class GenerateView(OpenAIReply):
    """A reply in vLLM's shape, without text and without the prompt."""

    _body: CompletionBody

    kind = event_kind = "generate"

    def __init__(self, context: ServingContext, generation: Generation, body: CompletionBody):
        super().__init__(context, generation, body)
        self._with_logprobs = body.logprobs is not None or self._asks_ids

    async def body(self) -> dict[str, Any]:
        choices = await self.choices()
        return {
            "request_id": self.generation.request_id,
            "choices": choices,
            "prompt_logprobs": [choice.pop("prompt_logprobs", None) for choice in choices][0],
            "kv_transfer_params": None,
            "usage": self.usage(),
            "weight_version": self.weight_version(),
        }

    async def choices(self) -> list[dict[str, Any]]:
        return [_without_prompt(choice) for choice in await super().choices()]

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {"index": index, "logprobs": await self._logprobs(choice.token_ids, choice.logprobs)}

    async def events(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        logprobs = await self._logprobs(delta.token_ids, delta.logprobs)
        event = await self._event(index, delta, {"index": index, "logprobs": logprobs})
        event["choices"] = [_without_prompt(choice) for choice in event["choices"]]
        return [event | {"request_id": self.generation.request_id}]

    async def _logprobs(self, ids: list[int], logprobs: list[Logprob]) -> dict[str, Any] | None:
        """Return one entry per token, or null if no log probabilities were asked for."""
        if not self._with_logprobs:
            return None
        content = (
            ChosenToken(token_name(token), entry.logprob, None, [TokenLogprob(token_name(t), p) for t, p in entry.top])
            for token, entry in zip(ids, logprobs, strict=True)
        )
        return {"content": await self.generation.pace.array(content, work_of(logprobs))}


def _without_prompt(choice: dict[str, Any]) -> dict[str, Any]:
    choice.pop("prompt_token_ids", None)
    return choice


# ------------------------------------------------------------------ text to tokens, and back


class TokenizeBody(LaxBody):
    """A text, or a conversation. messages: a conversation, which is rendered and tokenised as by
    /v1/chat/completions."""

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
                      "chat_template", "tools", "documents", "mm_processor_kwargs", "reasoning_effort",
                      "required_prefix_token_ids", "prompt_token_ids"})  # fmt: skip
# Fields of a chat body that are sampling parameters of /inference/v1/generate too. Logprobs have other forms there.
SAMPLING = {"n", "stop", "routed_experts_prompt_start"} | {
    name for name in SamplingParams.__struct_fields__ if "logprobs" not in name
}


def add_text_routes(router: APIRouter, context: ServingContext) -> None:
    @router.post("/tokenize", openapi_extra=takes(TokenizeBody))
    @RouteAccess.DATA
    async def tokenize(request: Request) -> Response:
        body = await read_lenient(request, TokenizeBody)
        if body.messages is not None:
            data = parse_json(await request.body())
            ids = await rendered(context, {k: v for k, v in data.items() if k in RENDERED})
        elif body.prompt is not None:
            ids = await context.encode(body.prompt, "prompt", body.add_special_tokens)
        else:
            raise InvalidField("prompt", "expected a prompt or messages")
        reply = {"count": len(ids), "max_model_len": context.max_model_len, "tokens": ids, "token_strs": None}
        if body.return_token_strs:
            tokenizer = context.require_tokenizer("return_token_strs")
            reply["token_strs"] = await context.pace().array(map(tokenizer.token_text, ids))
        return json_response(reply)

    @router.post("/detokenize", openapi_extra=takes(DetokenizeBody))
    @RouteAccess.DATA
    async def detokenize(request: Request) -> Response:
        """Decode at most a full context of tokens, since decoding blocks the event loop. No tokens give an empty text:
        a request that was aborted at once has none."""
        body = await read_lenient(request, DetokenizeBody)
        tokenizer = context.require_tokenizer("tokens")
        if len(body.tokens) > context.max_model_len:
            raise ContextLengthExceeded("tokens", context.max_model_len, f"the text of {len(body.tokens)} tokens")
        if any(type(token) is not int for token in body.tokens):
            raise InvalidField("tokens", "expected a list of token ids")
        check_vocabulary(body.tokens, context.vocab_size, "tokens")
        return json_response({"prompt": tokenizer.decode(body.tokens, body.skip_special_tokens)})

    @router.post("/v1/chat/completions/render", openapi_extra=takes(ChatBody))
    @RouteAccess.DATA
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
    return (await prepare_chat(context, body)).requests[0].prompt_token_ids
