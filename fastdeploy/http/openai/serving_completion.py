"""POST /v1/completions."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.choice import Choice, Delta
from fastdeploy.client.generation import Generation, GenerationRequest
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.outputs import Logprob
from fastdeploy.http.body import parse_body, read_generation
from fastdeploy.http.context import ServingContext, generation_request
from fastdeploy.http.openai.protocol import UNSUPPORTED, CompletionBody
from fastdeploy.http.openapi import streams, takes
from fastdeploy.http.serving.openai_reply import OpenAIReply, work_of

DEFAULT_MAX_TOKENS = 16  # the default of OpenAI and vLLM
IDS_PER_WORK = 16  # token ids that are checked in one unit of Pace


def completion_router(context: ServingContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=takes(CompletionBody), responses=streams())
    async def completions(request: Request) -> Response:
        body = parse_body(await read_generation(request), CompletionBody, UNSUPPORTED)
        checked = await prepare(context, body, DEFAULT_MAX_TOKENS)
        generation = Generation(context.client, context.tokenizer, checked, context.pace())
        return CompletionView(context, generation, body).response()

    return router


async def prepare(context: ServingContext, body: CompletionBody, default_max_tokens: int | None) -> GenerationRequest:
    """Check ``body`` and tokenise its prompts. default_max_tokens: None = the rest of the context. Raises InvalidField
    or ModelNotFound."""
    arrived = time.time()
    adapter = context.adapter(body.model)
    await context.client.require_engine()
    prompts = await tokenise(context, body)
    max_tokens = ("max_tokens", default_max_tokens if body.max_tokens is None else body.max_tokens)
    sampling = [context.sampling(body, len(ids), body.logprobs, max_tokens) for ids in prompts]
    context.check_reply(sampling, prompts, body.request_fields().n)
    return generation_request(body, "cmpl", prompts, sampling, context.text_options(body), arrived, adapter)


async def tokenise(context: ServingContext, body: CompletionBody) -> list[list[int]]:
    """Return the prompts as token ids. ``prompt`` is a string, ids, or a list of either."""
    prompt = body.prompt
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    prompts = prompt if several else [prompt]
    context.check_choices(len(prompts), body.request_fields().n)
    result, pace = [], context.pace()
    for i, item in enumerate(prompts):
        field = f"prompt[{i}]" if several else "prompt"
        if isinstance(item, str):
            context.check_text(item, field)
            ids = await context.require_tokenizer(field).encode(item, body.add_special_tokens is not False)
        elif isinstance(item, list) and (len(item) >= context.max_model_len or all(type(t) is int for t in item)):
            ids = item  # check_prompt refuses a prompt that is too long before it looks at the ids
            await pace.spend(len(ids) // IDS_PER_WORK)
        else:
            raise InvalidField(field, "expected a string, a list of token ids, or a list of either")
        context.check_prompt(ids, field)
        result.append(ids)
    return result


class CompletionView(OpenAIReply):
    _body: CompletionBody
    kind = event_kind = "text_completion"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._offsets = [0] * len(self.generation.choices)

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs, _ = await self._logprobs(choice.token_ids, choice.logprobs, 0)
        return {"index": index, "text": choice.text, "logprobs": logprobs}

    async def events(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        logprobs, self._offsets[index] = await self._logprobs(delta.token_ids, delta.logprobs, self._offsets[index])
        return [await self._event(index, delta, {"index": index, "text": delta.text, "logprobs": logprobs})]

    async def _logprobs(
        self, ids: list[int], logprobs: list[Logprob], offset: int
    ) -> tuple[dict[str, Any] | None, int]:
        """Return OpenAI's four aligned arrays, and the text offset after them."""
        if self._body.logprobs is None:
            return None, offset
        text, array = self.token_text, self.generation.pace.array
        offsets = list(accumulate((len(text(token)) for token in ids), initial=offset))
        top = (self._top(text(token), entry) for token, entry in zip(ids, logprobs, strict=True))
        return {
            "tokens": await array(text(token) for token in ids),
            "token_logprobs": await array(entry.logprob for entry in logprobs),
            "top_logprobs": await array(top, work_of(logprobs)),
            "text_offset": await array(offsets[:-1]),
        }, offsets[-1]

    def _top(self, token: str, entry: Logprob) -> dict[str, float]:
        text = self.token_text
        return {token: entry.logprob} | {text(token_id): logprob for token_id, logprob in entry.top}
