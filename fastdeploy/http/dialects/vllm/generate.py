"""POST /inference/v1/generate: token ids in, token ids out, whole or as a stream. The body is translated to the
body of a completion, which is checked and run like any other completion."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import PlainValidator
from starlette.responses import Response

from fastdeploy.client.choice import Choice, Delta
from fastdeploy.client.generation import Generation
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.request_fields import RequestFields
from fastdeploy.http.body import Body, parse_body, read_generation
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.completion import prepare
from fastdeploy.http.openai.protocol import UNSUPPORTED, CompletionBody
from fastdeploy.http.openai.reply import ChosenToken, OpenAIReply, TokenLogprob, token_name, work_of
from fastdeploy.http.openapi import described, schema_of, streams, takes

# Fields outside of sampling_params that have the same name in a completion.
PASSED_ON = frozenset({"model", "request_id", "stream", "stream_options", *RequestFields.__struct_fields__}) - {"n"}
NOT_SAMPLING = frozenset({"prompt", "token_ids", "echo"}) | PASSED_ON
# Fields of vLLM's SamplingParams that change no token: how vLLM delivers outputs, where it looks for prefixes, and from
# which position it returns experts. verifiers sends the last one always, and return_routed_experts is refused.
HARMLESS_SAMPLING = frozenset({
    "output_kind", "flat_logprobs", "skip_reading_prefix_cache", "routed_experts_prompt_start",
})  # fmt: skip
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
    async def generate(request: Request) -> Response:
        """Generate from token ids. X-Session-ID names the session, for a fleet. Without max_tokens the limit is
        the rest of the context, as in vLLM on this route (not the 16 of its SamplingParams)."""
        body = parse_generate(await read_generation(request))
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


class GenerateView(OpenAIReply):
    """A reply in vLLM's shape, without text and without the prompt."""

    _body: CompletionBody

    kind = event_kind = "generate"

    def __init__(self, context: ServingContext, generation: Generation, body: CompletionBody):
        super().__init__(context, generation, body)
        self._with_logprobs = body.logprobs is not None

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

    async def events(self, index: int, delta: Delta) -> list[dict[str, Any]]:
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
