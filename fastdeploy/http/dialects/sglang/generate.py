"""POST /generate in SGLang's shape, whole or as a stream. Each event of a stream repeats everything so far."""

from __future__ import annotations

import base64
import struct
import time
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.choice import Choice, Delta
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.generation import Generation, GenerationRequest
from fastdeploy.client.pace import GrowingArray, Pace
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.errors import FastDeployError, InvalidField
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.request_fields import RequestFields
from fastdeploy.http.body import read_json
from fastdeploy.http.context import ServingContext, engine_requests
from fastdeploy.http.dialects.sglang.generate_body import GenerateBody, Prompts, parse_generate, read_prompts
from fastdeploy.http.openapi import streams, takes
from fastdeploy.http.serving.openai_reply import weight_versions
from fastdeploy.http.serving.responses import EventStream, JsonResponse
from fastdeploy.inter_communicator import messages as m

# Bytes of the ids that the tokens of one request were drawn from. They are held until the request has ended. 64 MiB is
# 400 tokens of a vocabulary of 42,000 that top_p does not cut. With a usual top_p a token has tens to hundreds of ids.
MAX_KEPT_BYTES = 64 << 20
KEPT = "sampling_params.custom_params.return_top_p_token_ids"
# AReaL recognises an abort without tokens by this beginning of the message.
BEFORE_PREFILL = "Abort before prefill"


def add_routes(router: APIRouter, context: ServingContext) -> None:
    @router.put("/generate", openapi_extra=takes(GenerateBody), responses=streams())
    @router.post("/generate", openapi_extra=takes(GenerateBody), responses=streams())
    async def generate(request: Request) -> Response:
        body = parse_generate(await read_json(request))
        context.check_model(body.model)
        await context.client.require_engine()
        prompts = await read_prompts(context, body)
        checked = to_request(prompts, body)
        generation = LabelledGeneration(context.client, context.tokenizer, checked, context.pace())
        view = GenerateView(context, generation, body, prompts)
        if body.stream:
            return EventStream(generation, view.events, list, context.config.keepalive_s)
        return JsonResponse(generation, view.body, view.outputs)


def to_request(prompts: Prompts, body: GenerateBody) -> GenerationRequest:
    every = prompts.prompts
    salt = body.cache_salt or body.extra_key or ""
    fields = RequestFields(n=prompts.n, priority=body.priority, cache_salt=salt)
    requests = engine_requests(
        [p.rid for p in every], [p.ids for p in every], [p.sampling for p in every], fields, prompts.group
    )
    return GenerationRequest(requests, [p.text for p in every])


class LabelledGeneration(Generation):
    """A generation that also knows the label of weights for a choice without tokens: ``label``, which is asked of the
    engine when such a choice ends. A request with more than MAX_KEPT_BYTES of kept ids ends with InvalidField."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, request: GenerationRequest, pace: Pace):
        super().__init__(client, tokenizer, request, pace)
        self.label: str | None = None
        self._kept_bytes = 0

    async def step(self) -> list[tuple[int, Delta]]:
        deltas = await super().step()
        self._kept_bytes += sum(len(entry.kept) for _, delta in deltas for entry in delta.logprobs)
        if self._kept_bytes > MAX_KEPT_BYTES:
            raise InvalidField(KEPT, f"more than {MAX_KEPT_BYTES >> 20} MiB of ids: lower top_p or max_new_tokens")
        if self.label is None and any(d.finish_reason and not self.choices[i].token_ids for i, d in deltas):
            try:
                self.label = (await self._client.call(m.PauseStatusArgs())).get("version")
            except FastDeployError:  # the engine has died since, but the request has ended
                self.label = ""
        return deltas


class SentChoice:
    """The fields of one choice that grow with each event, already encoded. num_tokens: tokens in them."""

    def __init__(self, pace: Pace):
        self.text = ""
        self.num_tokens = 0
        self.ids = GrowingArray(pace)
        self.triples = GrowingArray(pace)
        self.top = GrowingArray(pace)


class GenerateView:
    """The reply to one request in SGLang's shape."""

    def __init__(self, context: ServingContext, generation: LabelledGeneration, body: GenerateBody, prompts: Prompts):
        self.generation = generation
        self._context = context
        self._prompts = prompts
        self._with_text = body.return_text_in_logprobs
        self._with_prompt = body.return_prompt_token_ids
        self._sent = [SentChoice(generation.pace) for _ in generation.choices]
        self._input_logprobs: dict[int, tuple[int, dict[str, Any]]] = {}  # by prompt
        self._began = time.monotonic()

    @property
    def _several(self) -> bool:
        return self._prompts.batch or self._prompts.n > 1

    async def body(self) -> Any:
        outputs = await self.outputs()
        return outputs if self._several else outputs[0]

    async def outputs(self) -> list[dict[str, Any]]:
        return [await self._output(i, choice.text) for i, choice in enumerate(self.generation.choices)]

    async def events(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        sent = self._sent[index]
        sent.text += delta.text
        chunk = await self._output(index, sent.text)
        return [chunk | {"index": index} if self._several else chunk]

    async def _output(self, index: int, text: str) -> dict[str, Any]:
        prompt = self._prompts.prompts[index // self._prompts.n]
        choice, sent = self.generation.choices[index], self._sent[index]
        kept = 0 if prompt.scoring else len(choice.token_ids)
        await self._append_new(index, kept)
        meta: dict[str, Any] = {
            "id": prompt.rid,
            "finish_reason": finish_reason(choice, kept),
            "prompt_tokens": len(prompt.ids),
            "completion_tokens": kept,
            "cached_tokens": self.generation.cached_tokens_of(index // self._prompts.n),
            **self._versions(choice, kept),
        }
        if prompt.logprobs.wanted:
            meta |= await self._logprobs(index)
        if choice.finish_reason is not None:
            meta["e2e_latency"] = time.monotonic() - self._began
        output = {"text": "" if prompt.scoring else text, "output_ids": sent.ids.raw(), "meta_info": meta}
        return output | {"prompt_token_ids": prompt.ids} if self._with_prompt else output

    async def _append_new(self, index: int, kept: int) -> None:
        """Append the tokens that are new since the last event, up to the first ``kept`` tokens of the choice."""
        prompt = self._prompts.prompts[index // self._prompts.n]
        choice, sent = self.generation.choices[index], self._sent[index]
        ids, entries = choice.token_ids[sent.num_tokens : kept], choice.logprobs[sent.num_tokens : kept]
        sent.num_tokens = kept
        await sent.ids.extend(ids)
        if prompt.logprobs.wanted:
            await sent.triples.extend(self._triple(e.logprob, t) for t, e in zip(ids, entries, strict=True))
            if prompt.logprobs.top:
                await sent.top.extend(map(self._top, entries), 1 + prompt.logprobs.top)

    def _versions(self, choice: Choice, kept: int) -> dict[str, Any]:
        """Return the labels of weights. weight_version is that of the last token. For a choice without tokens it is the
        label of the weights that served when the choice ended."""
        spans = choice.spans if kept else []
        label = choice.spans[-1].version if choice.spans else self.generation.label
        return {"weight_version": label, "weight_versions": weight_versions(spans)}

    async def _logprobs(self, index: int) -> dict[str, Any]:
        """Return triples [logprob, id, text or null] of the output and of the prompt from logprob_start_len on. The
        first token of a prompt has a null logprob."""
        prompt, sent = self._prompts.prompts[index // self._prompts.n], self._sent[index]
        fields: dict[str, Any] = {
            "output_token_logprobs": sent.triples.raw(),
            "output_token_logprobs_length": sent.num_tokens,
            **await self._of_prompt(index // self._prompts.n),
        }
        if prompt.logprobs.top:
            fields["output_top_logprobs"] = sent.top.raw()
        choice = self.generation.choices[index]
        if prompt.logprobs.kept and choice.finish_reason is not None:
            fields |= kept_ids(choice.logprobs[: sent.num_tokens])
        return fields

    async def _of_prompt(self, number: int) -> dict[str, Any]:
        """Return the fields about the tokens of a prompt. They are encoded again only when more of them are known."""
        prompt = self._prompts.prompts[number]
        entries = self.generation.choices[number * self._prompts.n].prompt_logprobs
        known, fields = self._input_logprobs.get(number, (-1, {}))
        if known == len(entries):
            return fields
        start, array = prompt.logprobs.start, self.generation.pace.array
        given: list[Logprob | None] = [None, *entries][start:] if start >= 0 else []
        ids = prompt.ids[start : start + len(given)] if given else []
        triples = (self._triple(e.logprob if e else None, t) for t, e in zip(ids, given, strict=True))
        fields = {"input_token_logprobs": await array(triples)}
        if prompt.logprobs.top:
            fields["input_top_logprobs"] = await array(map(self._top, given), 1 + prompt.logprobs.top)
        self._input_logprobs[number] = len(entries), fields
        return fields

    def _triple(self, logprob: float | None, token: int) -> tuple[float | None, int, str | None]:
        tokenizer = self._context.tokenizer
        return logprob, token, tokenizer.token_text(token) if self._with_text and tokenizer else None

    def _top(self, entry: Logprob | None) -> list[tuple[float | None, int, str | None]] | None:
        return None if entry is None else [self._triple(logprob, token) for token, logprob in entry.top]


def kept_ids(entries: list[Logprob]) -> dict[str, str]:
    """Return the ids that each token was drawn from, as slime reads them: base64 of the int32 ids of all tokens in a
    row, and base64 of the int32 offsets of each token's first id, with the end as last offset. Empty if neither top_p
    nor top_k nor min_p excludes a token."""
    if entries and not any(entry.kept for entry in entries):
        return {}
    offsets = [0, *accumulate(len(entry.kept) // 4 for entry in entries)]
    return {
        "top_p_token_ids": base64.b64encode(b"".join(entry.kept for entry in entries)).decode(),
        "top_p_token_offsets": base64.b64encode(struct.pack(f"<{len(offsets)}i", *offsets)).decode(),
    }


def finish_reason(choice: Choice, kept: int) -> dict[str, Any] | None:
    """Return SGLang's finish_reason, which is None until the choice has ended."""
    match choice.finish_reason:
        case None:
            return None
        case "stop":
            matched = choice.stop_reason if choice.stop_reason is not None else choice.token_ids[-1]
            return {"type": "length", "length": 0} if not kept else {"type": "stop", "matched": matched}
        case "length":
            return {"type": "length", "length": kept}
        case "error":  # SGLang's form. The status keeps clients from resuming this as an abort.
            return {
                "type": "abort",
                "message": choice.message,
                "status_code": 500,
                "err_type": "InternalServerError",
            }
    message = choice.message or "Aborted"
    if not choice.token_ids and not message.startswith(BEFORE_PREFILL):
        message = f"{BEFORE_PREFILL}: {message}"
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}
