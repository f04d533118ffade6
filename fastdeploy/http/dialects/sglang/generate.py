"""POST /generate in SGLang's shape, whole or as a stream. Each event of a stream repeats everything so far."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.choice import Choice, ChoiceDelta
from fastdeploy.client.generation import Generation, GenerationRequest
from fastdeploy.client.pace import GrowingArray, Pace
from fastdeploy.client.serving_client import ServingClient
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.request_fields import RequestFields, part_id
from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.http.body import read_generation
from fastdeploy.http.context import ServingContext, engine_requests
from fastdeploy.http.dialects.sglang.generate_body import GenerateBody, Prompt, Prompts, parse_generate, read_prompts
from fastdeploy.http.dialects.sglang.scores import flat_top, top_p_ids
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openai.meta_info import finish_reason
from fastdeploy.http.openai.reply import mask_work, weight_versions
from fastdeploy.http.openai.responses import EventStream, JsonResponse
from fastdeploy.http.openapi import streams, takes
from fastdeploy.http.routed_experts import sglang
from fastdeploy.inter_communicator import messages as m


def add_routes(router: APIRouter, context: ServingContext) -> None:
    @router.put("/generate", openapi_extra=takes(GenerateBody), responses=streams())
    @router.post("/generate", openapi_extra=takes(GenerateBody), responses=streams())
    @RouteAccess.DATA
    async def generate(request: Request) -> Response:
        body = parse_generate(await read_generation(request))
        await context.client.require_engine()
        prompts = await read_prompts(context, body)
        checked = to_request(prompts, body)
        generation = LabelledGeneration(context.client, context.tokenizer, checked, context.pace())
        view = GenerateView(context, generation, body, prompts)
        if body.stream:
            return EventStream(generation, view.events, list, context.config.keepalive_s)
        return JsonResponse(generation, view.body, view.outputs)


def to_request(prompts: Prompts, body: GenerateBody) -> GenerationRequest:
    salt = body.cache_salt or body.extra_key or ""
    fields = RequestFields(
        n=prompts.n, priority=body.priority, cache_salt=salt, session=body.session, stale_ok=body.stale_ok
    )
    parts = ((p.rid, p.ids, p.sampling, p.adapter, p.text) for p in prompts.prompts)
    names, ids, sampling, adapters, texts = zip(*parts, strict=True)
    if prompts.group:
        names = tuple(part_id(prompts.group, i) for i in range(len(names)))
    requests = engine_requests(names, ids, sampling, adapters, fields, prompts.group)
    return GenerationRequest(requests, list(texts), body.stream)


class LabelledGeneration(Generation):
    """A generation that knows the label of the weights of each choice.

    labels: by adapter, the label of the weights for choices without tokens. The engine is asked for a label when such a
    choice ends."""

    def __init__(self, client: ServingClient, tokenizer: Tokenizer | None, request: GenerationRequest, pace: Pace):
        super().__init__(client, tokenizer, request, pace)
        self.labels: dict[str, str] = {}

    async def step(self) -> list[tuple[int, ChoiceDelta]]:
        deltas = await super().step()
        for i, delta in deltas:
            if delta.finish_reason and not self.choices[i].spans:
                await self._ask_label(self.adapters[i // self.n])
        return deltas

    async def _ask_label(self, adapter: str) -> None:
        if adapter not in self.labels:
            try:
                status = await self._client.call(m.PauseStatusArgs(adapter_scope(adapter or None)))
                self.labels[adapter] = status.get("version", "")
            except FastDeployError:  # the adapter or the engine is gone, but the request has ended
                self.labels[adapter] = ""


class ChoiceReply:
    """One choice with the fields of its reply that grow with each event, already encoded.

    number: that of the prompt. num_tokens: tokens in the encoded fields."""

    def __init__(self, number: int, prompt: Prompt, choice: Choice, pace: Pace):
        self.number, self.prompt, self.choice = number, prompt, choice
        self.text = ""
        self.num_tokens = 0
        self.ids = GrowingArray(pace)
        self.triples = GrowingArray(pace)
        self.top = GrowingArray(pace)
        self.chosen = GrowingArray(pace)
        self.mask = GrowingArray(pace)
        self.mask_logprobs = GrowingArray(pace)


class GenerateView:
    """The reply to one request in SGLang's shape."""

    def __init__(self, context: ServingContext, generation: LabelledGeneration, body: GenerateBody, prompts: Prompts):
        self.generation = generation
        self._context = context
        self._with_text = body.return_text_in_logprobs
        self._with_prompt = body.return_prompt_token_ids
        self._several = prompts.batch or prompts.n > 1
        numbers = [i // prompts.n for i in range(len(generation.choices))]
        self._replies = [
            ChoiceReply(number, prompts.prompts[number], choice, generation.pace)
            for number, choice in zip(numbers, generation.choices, strict=True)
        ]
        self._first_of = self._replies[:: prompts.n]  # by prompt
        self._input_logprobs: dict[int, tuple[bool, dict[str, Any]]] = {}  # by prompt: whether all are known
        self._began = time.monotonic()

    async def body(self) -> Any:
        outputs = await self.outputs()
        return outputs if self._several else outputs[0]

    async def outputs(self) -> list[dict[str, Any]]:
        return [await self._output(reply, reply.choice.text) for reply in self._replies]

    async def events(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        reply = self._replies[index]
        reply.text += delta.text
        event = await self._output(reply, reply.text)
        return [event | {"index": index} if self._several else event]

    async def _output(self, reply: ChoiceReply, text: str) -> dict[str, Any]:
        prompt, choice = reply.prompt, reply.choice
        num_tokens = len(choice.token_ids)
        await self._append_new(reply)
        meta: dict[str, Any] = {
            "id": prompt.rid,
            "finish_reason": finish_reason(choice),
            "prompt_tokens": len(prompt.ids),
            "completion_tokens": num_tokens,
            "cached_tokens": self.generation.cached_tokens[reply.number],
            # The label of the last token, or of the weights that served when a choice without tokens ended.
            "weight_version": choice.spans[-1].version if choice.spans else self.generation.labels.get(prompt.adapter),
            "weight_versions": weight_versions(choice.spans),
        }
        if prompt.logprobs.wanted:
            meta |= await self._logprobs(reply)
        if prompt.logprobs.mask:
            meta |= self._mask(reply)
        if choice.finish_reason is not None:
            meta["e2e_latency"] = time.monotonic() - self._began
            if (routed := choice.routed_experts) is not None:
                meta["routed_experts"] = await sglang(self.generation.pace, routed)
                meta["routed_experts_start_len"] = routed.start
        output = {"text": text, "output_ids": reply.ids.raw(), "meta_info": meta}
        return output | {"prompt_token_ids": prompt.ids} if self._with_prompt else output

    async def _append_new(self, reply: ChoiceReply) -> None:
        """Append the tokens that are new since the last event."""
        options, choice = reply.prompt.logprobs, reply.choice
        ids, entries = choice.token_ids[reply.num_tokens :], choice.logprobs[reply.num_tokens :]
        reply.num_tokens = len(choice.token_ids)
        await reply.ids.extend(ids)
        if options.wanted:
            await reply.triples.extend(self._triple(e.logprob, t) for t, e in zip(ids, entries, strict=True))
            if options.listed:
                await reply.top.extend(map(self._top, entries), 1 + options.listed)
        if options.mask:
            await reply.chosen.extend(entry.logprob for entry in entries)
            await reply.mask.extend((memoryview(e.mask_ids).cast("i").tolist() for e in entries), mask_work(entries))
        if options.mask_logprobs:
            rows = (memoryview(e.mask_logprobs).cast("f").tolist() for e in entries)
            await reply.mask_logprobs.extend(rows, mask_work(entries))

    async def _logprobs(self, reply: ChoiceReply) -> dict[str, Any]:
        """Return triples [logprob, id, text or null] of the output and of the prompt from logprob_start_len on. The
        first token of a prompt has a null logprob."""
        options = reply.prompt.logprobs
        fields: dict[str, Any] = {
            "output_token_logprobs": reply.triples.raw(),
            "output_token_logprobs_length": reply.num_tokens,
            **await self._of_prompt(reply.number),
        }
        if options.listed:
            fields["output_token_ids_logprobs" if options.ids else "output_top_logprobs"] = reply.top.raw()
        if options.flat_output and reply.choice.finish_reason is not None:
            entries, as_base64 = [*reply.choice.logprobs], options.flat_output == "base64"
            fields |= await asyncio.to_thread(flat_top, "output", entries, options.top, as_base64)
            fields["output_top_logprobs_temperature_scaled"] = options.temperature_scaled
        if options.top_p_ids and reply.choice.finish_reason is not None:
            fields |= top_p_ids(reply.choice.logprobs)
        return fields

    def _mask(self, reply: ChoiceReply) -> dict[str, Any]:
        """Return the ids that each token was drawn from, and the logprob of the token over them: with mode "support"
        that of each of the ids. miles reads these in a field of their own."""
        options = reply.prompt.logprobs
        fields: dict[str, Any] = {
            "output_token_sampling_mask": reply.mask.raw(),
            "output_token_sampling_mask_length": reply.num_tokens,
            "output_token_sampling_logprobs": (
                reply.mask_logprobs if options.mask == "support" else reply.chosen
            ).raw(),
        }
        if options.mask_logprobs and options.mask != "support":
            fields["output_token_sampling_mask_logprobs"] = reply.mask_logprobs.raw()
        return fields

    async def _of_prompt(self, number: int) -> dict[str, Any]:
        """Return the fields about the tokens of a prompt: empty lists until all are known. They are encoded again only
        when all have become known."""
        first = self._first_of[number]
        prompt, entries = first.prompt, first.choice.prompt_logprobs
        was_known, fields = self._input_logprobs.get(number, (False, {}))
        if fields and was_known == (entries is not None):
            return fields
        start, array = prompt.logprobs.start, self.generation.pace.array
        given: list[Logprob | None] = [None, *entries][start:] if start >= 0 and entries is not None else []
        ids = prompt.ids[start : start + len(given)] if given else []
        triples = (self._triple(e.logprob if e else None, t) for t, e in zip(ids, given, strict=True))
        fields = {"input_token_logprobs": await array(triples)}
        options = prompt.logprobs
        if options.flat_input:
            as_base64 = options.flat_input == "base64"
            fields |= await asyncio.to_thread(flat_top, "input", given, options.top, as_base64)
        elif options.top or options.ids:
            name = "input_token_ids_logprobs" if options.ids else "input_top_logprobs"
            fields[name] = await array(map(self._top, given), 1 + options.top + len(options.ids))
        self._input_logprobs[number] = entries is not None, fields
        return fields

    def _triple(self, logprob: float | None, token: int) -> tuple[float | None, int, str | None]:
        tokenizer = self._context.tokenizer
        return logprob, token, tokenizer.token_text(token) if self._with_text and tokenizer else None

    def _top(self, entry: Logprob | None) -> list[tuple[float | None, int, str | None]] | None:
        return None if entry is None else [self._triple(logprob, token) for token, logprob in entry.top]
