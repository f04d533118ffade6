"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.choice import Choice, ChoiceDelta
from fastdeploy.client.generation import WORK_PER_TOKEN, Generation, GenerationRequest
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.outputs import Logprob
from fastdeploy.http.body import parse_body, read_generation
from fastdeploy.http.context import ServingContext
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openai.protocol import UNSUPPORTED, CompletionBody, generation_request, sampling_of, text_options
from fastdeploy.http.openai.reply import OpenAIReply, work_of
from fastdeploy.http.openai.structured import constraints
from fastdeploy.http.openapi import streams, takes

DEFAULT_MAX_TOKENS = 16  # the default of OpenAI and vLLM
CHAT_FIELDS = frozenset({
    "messages", "tools", "chat_template", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt",
    "continue_final_message", "required_prefix_token_ids", "top_logprobs", "max_completion_tokens",
})  # fmt: skip
IDS_PER_WORK = 16  # token ids that are checked in one unit of Pace


def completion_router(context: ServingContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=takes(CompletionBody), responses=streams())
    @RouteAccess.DATA
    async def completions(request: Request) -> Response:
        body = parse_completion(await read_generation(request))
        checked = await prepare(context, body, DEFAULT_MAX_TOKENS)
        generation = Generation(context.client, context.tokenizer, checked, context.pace())
        return CompletionView(context, generation, body).response()

    return router


def parse_completion(data: dict[str, Any]) -> CompletionBody:
    """Check a body. If its prompt is token ids, the fields that make the prompt of a chat are ignored: rLLM leaves them
    in the body of a chat's later turns. The limit of a chat, ``max_completion_tokens``, is then that of the completion.
    Beside a text they are refused, since the client may expect the text to be rendered. Raises InvalidField."""
    if isinstance(data.get("prompt"), list):
        limit = data.get("max_completion_tokens")
        data = {name: value for name, value in data.items() if name not in CHAT_FIELDS}
        data |= {"max_tokens": limit} if limit is not None else {}
    return parse_body(data, CompletionBody, UNSUPPORTED)


async def prepare(context: ServingContext, body: CompletionBody, default_max_tokens: int | None) -> GenerationRequest:
    """Check ``body`` and tokenise its prompts. default_max_tokens: None = the rest of the context. Raises InvalidField
    or ModelNotFound."""
    arrived = time.time()
    adapter = context.adapter(body.model)
    await context.client.require_engine()
    _check_echo(body)
    prompts = await tokenise(context, body)
    wanted = default_max_tokens if body.max_tokens is None else body.max_tokens
    max_tokens = ("max_tokens", 1 if body.prompt_only else wanted)
    limits = await constraints(context, body)
    sampling = [sampling_of(context, body, len(ids), body.logprobs, max_tokens, limits) for ids in prompts]
    prompt_field = "prompt_logprobs" if body.prompt_logprobs is not None else "logprobs"
    context.check_reply(sampling, prompts, body.request_fields.n, prompt_field)
    text = text_options(context, body, body.prompt_only)
    return generation_request(body, "cmpl", prompts, sampling, text, arrived, adapter)


def _check_echo(body: CompletionBody) -> None:
    """Raise InvalidField for fields that leave no meaning for echo. The text of resumed tokens is both prompt and
    answer. The engine computes the logprobs of a prompt with its first choice, and other choices may stream earlier."""
    fields = body.request_fields
    if body.echo and fields.resumed_tokens:
        raise InvalidField("echo", "expected false with resumed_tokens")
    if body.echo and body.stream and body.logprobs is not None and fields.n > 1:
        raise InvalidField("n", f"expected 1 with echo, logprobs and stream together, got {fields.n}")


async def tokenise(context: ServingContext, body: CompletionBody) -> list[list[int]]:
    """Return the prompts as token ids. ``prompt`` is a string, ids, or a list of either."""
    prompts, several = prompts_given(body)
    context.check_choices(len(prompts), body.request_fields.n)
    result, pace = [], context.pace()
    for i, item in enumerate(prompts):
        field = f"prompt[{i}]" if several else "prompt"
        if isinstance(item, str):
            item = await context.encode(item, field, body.add_special_tokens is not False)
        result.append(context.check_prompt(item, field, "a string, a list of token ids, or a list of either"))
        await pace.spend(len(item) // IDS_PER_WORK)
    return result


def prompts_given(body: CompletionBody) -> tuple[list[Any], bool]:
    """Return the prompts as the client gave them, and whether they are a list of prompts."""
    prompt = body.prompt
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    return (prompt if several else [prompt]), several


class CompletionView(OpenAIReply):
    _body: CompletionBody
    kind = event_kind = "text_completion"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._offsets = [0] * len(self.generation.choices)
        self._prompt_texts: dict[int, str] = {}

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text, ids, entries = choice.text, choice.token_ids, choice.logprobs
        shown, _ = await self._shown(text, ids, entries, index, with_prompt=bool(self._body.echo), offset=0)
        return {"index": index, **shown}

    async def events(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        with_prompt, offset = bool(self._body.echo) and index not in self._seen, self._offsets[index]
        shown, self._offsets[index] = await self._shown(
            delta.text, delta.token_ids, delta.logprobs, index, with_prompt, offset
        )
        return [await self._event(index, delta, {"index": index, **shown})]

    async def _shown(
        self, text: str, ids: list[int], logprobs: list[Logprob], index: int, with_prompt: bool, offset: int
    ) -> tuple[dict[str, Any], int]:
        """Return the text and the logprobs of some tokens of choice ``index``, and the text offset after them.
        with_prompt: the prompt comes first (echo). offset: that of the first token."""
        entries: list[Logprob | None] = [*logprobs]
        if with_prompt:
            prompt = self._prompt(index)
            text = await self._prompt_text(index // self.generation.n) + text
            ids, entries = prompt + ids, self._prompt_entries(index) + entries
        if self._body.logprobs is None and not self._asks_ids:
            return {"text": text, "logprobs": None}, offset
        arrays, end = await self._arrays(ids, entries, offset)
        return {"text": text, "logprobs": arrays}, end

    async def _prompt_text(self, number: int) -> str:
        """Return the text of a prompt. One that came as token ids is decoded with its special tokens."""
        if number not in self._prompt_texts:
            prompts, _ = prompts_given(self._body)
            self._prompt_texts[number] = await self._decoded(prompts[number], self.generation.prompts[number])
        return self._prompt_texts[number]

    async def _decoded(self, given: Any, ids: list[int]) -> str:
        tokenizer = self._context.tokenizer
        if tokenizer is None or self._body.detokenize is False:
            return ""
        if isinstance(given, str):
            return given
        text = tokenizer.decode(ids, skip_special_tokens=False)
        await self.generation.pace.spend(WORK_PER_TOKEN * len(ids))
        return text

    def _prompt_entries(self, index: int) -> list[Logprob | None]:
        """Return an entry for each token of a prompt: None for the first token, and for all if the request was aborted
        within its prompt."""
        prompt, n = self._prompt(index), self.generation.n
        known = self.generation.choices[index // n * n].prompt_logprobs
        return [None] * len(prompt) if known is None else [None, *known]

    async def _arrays(self, ids: list[int], entries: list[Logprob | None], offset: int) -> tuple[Any, int]:
        """Return OpenAI's four aligned arrays, and the text offset after them."""
        texts = list(map(self.token_text, ids))
        offsets = list(accumulate(map(len, texts), initial=offset))
        columns: dict[str, Iterable[Any]] = {
            "tokens": texts,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": map(self._top, texts, entries),
            "text_offset": offsets[:-1],
        }
        return await self.generation.pace.columns(len(ids), columns, 3 + work_of(entries)), offsets[-1]

    def _top(self, token: str, entry: Logprob | None) -> dict[str, float] | None:
        if entry is None:
            return None
        top = {token: entry.logprob}
        for token_id, logprob in entry.top if entry.top_ids else ():
            top[self.token_text(token_id)] = logprob
        return top
