"""The JSON of a generation in OpenAI's shape, with token ids and weight versions added."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain, count, repeat
from typing import Any

import msgspec

from fastdeploy.client.choice import Choice, ChoiceDelta
from fastdeploy.client.generation import Generation, choice_error
from fastdeploy.client.pace import Pace
from fastdeploy.core.experts import RoutedExperts
from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.http.body import given_fields
from fastdeploy.http.context import ServingContext
from fastdeploy.http.errors import error_body
from fastdeploy.http.openai.protocol import GenerationBody, StreamOptions, routing_asked
from fastdeploy.http.openai.responses import EventStream, GenerationResponse, JsonResponse
from fastdeploy.http.routed_experts import ENCODERS, Form

MAX_DIGITS = 18  # of an integer that fits 64 bits


def weight_versions(spans: list[Span]) -> list[dict[str, Any]]:
    """Return ``spans`` as clients see them, without empty spans. ``recomputed`` is left out if it is false, and so
    are the adapter and the quantization if there is none."""
    return [_shown(span) for span in spans if span.end > span.start]


def _shown(span: Span) -> dict[str, Any]:
    fields = {"version": span.version, "weight_epoch": span.weight_epoch, "start": span.start, "end": span.end}
    if span.adapter:
        fields |= {"lora_name": span.adapter, "adapter_epoch": span.adapter_epoch}
    if span.recomputed:
        fields["recomputed"] = True
    if span.quantization:
        fields["quantization"] = span.quantization
    return fields


def version_bounds(spans: list[Span]) -> dict[str, Any]:
    """Return the labels of the oldest and of the newest weights, or nulls without spans. If only the label changed,
    the first label counts as the oldest and the last label as the newest."""
    if not spans:
        return {"min_weight_version": None, "max_weight_version": None}
    oldest, newest = min(spans, key=_age), max(reversed(spans), key=_age)
    return {"min_weight_version": oldest.version, "max_weight_version": newest.version}


def weight_version(spans: Iterable[Span]) -> int | None:
    """Return the label of the oldest weights as an integer, as rLLM reads it. None if the trainer's label is no decimal
    number. Any other number, such as the weight_epoch, would be compared with the trainer's own count."""
    oldest = min(spans, key=_age, default=None)
    return None if oldest is None else _number(oldest.version)


@lru_cache(maxsize=64)
def _number(label: str) -> int | None:
    return int(label) if label.isascii() and label.isdecimal() and len(label) <= MAX_DIGITS else None


def _age(span: Span) -> tuple[int, int]:
    """Return a key that never falls from one span of a choice to the next."""
    return span.weight_epoch, span.adapter_epoch


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """An entry of OpenAI's ``top_logprobs`` in a chat."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class ChosenToken(TokenLogprob, frozen=True):
    """An entry of OpenAI's ``logprobs.content``: a token of the answer with its best alternatives."""

    top_logprobs: list[TokenLogprob] = []


def work_of(entries: Iterable[Logprob | None]) -> int:
    """Return the units of Pace that one of ``entries`` costs."""
    for entry in entries:
        if entry is not None:
            return 1 + entry.num_top
    return 1


async def mask_ids(pace: Pace, entries: list[Logprob]) -> msgspec.Raw:
    """Return the JSON array of the ids that each token was drawn from."""
    rows = (memoryview(entry.mask_ids).cast("i").tolist() for entry in entries)
    return await pace.array(rows, mask_work(entries))


async def mask_logprobs(pace: Pace, entries: list[Logprob]) -> msgspec.Raw:
    """Return the JSON array of the logprobs of these ids."""
    rows = (memoryview(entry.mask_logprobs).cast("f").tolist() for entry in entries)
    return await pace.array(rows, mask_work(entries))


def mask_work(entries: list[Logprob]) -> int:
    """Return the units of Pace that the mask of one of ``entries`` costs, on average."""
    return 1 + sum(len(entry.mask_ids) for entry in entries) // (4 * len(entries) or 1)


class OpenAIReply:
    """The JSON of one generation in OpenAI's shape. Subclasses have their own shape of a choice and of an event."""

    kind: str
    event_kind: str

    def __init__(self, context: ServingContext, generation: Generation, body: GenerationBody):
        self.generation = generation
        self._context = context
        self._body = body
        options = body.stream_options or StreamOptions()
        self._include_usage = bool(options.include_usage)
        self._continuous_usage = bool(options.continuous_usage_stats)
        asked = given_fields(body, SamplingParams)
        self._asks_ids = bool(asked.get("logprob_token_ids"))
        self._asks_mask = bool(asked.get("return_sampling_mask"))
        self._asks_mask_logprobs = bool(asked.get("return_sampling_mask_logprobs"))
        routing = routing_asked(context, body)
        self._routing_form = None if routing is None else routing.form
        self._with_prompt = bool(body.return_token_ids or body.return_prompt_token_ids)
        self._seen: set[int] = set()
        self.token_text: Callable[[int], str] = token_name
        if context.tokenizer is not None and not body.return_tokens_as_token_ids:
            self.token_text = context.tokenizer.token_text

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    async def events(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        raise NotImplementedError

    def response(self) -> GenerationResponse:
        if not self._body.stream:
            return JsonResponse(self.generation, self.body, self.choices)
        return EventStream(self.generation, self.events, self.last_events, self._context.config.keepalive_s)

    async def body(self) -> dict[str, Any]:
        shown = {"choices": await self.choices(), "usage": self.usage(), "weight_version": self.weight_version()}
        return self._head(self.kind) | shown

    async def choices(self) -> list[dict[str, Any]]:
        return [await self.choice(i, c) | await self._identity(i, c) for i, c in enumerate(self.generation.choices)]

    def last_events(self) -> list[dict[str, Any]]:
        if not self._include_usage:
            return []
        return [self._head(self.event_kind) | {"choices": [], "usage": self.usage()}]

    def weight_version(self) -> int | None:
        """Return the number of the oldest weights of all choices."""
        return weight_version(span for choice in self.generation.choices for span in choice.spans)

    def usage(self) -> dict[str, Any]:
        generation = self.generation
        prompt = sum(map(len, generation.prompts))
        return _usage(prompt, generation.completion_tokens, sum(generation.cached_tokens))

    def _usage_so_far(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the usage of one choice up to the end of ``delta``."""
        cached = self.generation.cached_tokens[index // self.generation.n]
        return _usage(len(self._prompt(index)), delta.first + len(delta.token_ids), cached)

    def _head(self, kind: str) -> dict[str, Any]:
        """Return the fields of every body and event. system_fingerprint: the engine's boot id, since each boot counts
        weight_epoch anew."""
        welcome = self._context.client.welcome
        return {
            "id": self.generation.request_id,
            "object": kind,
            "created": self.generation.created,
            "model": self._context.model_name(self.generation.adapters[0]),
            "system_fingerprint": welcome.boot_id if welcome is not None else None,
        }

    async def _identity(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return the fields of a choice of a full reply that do not depend on the subclass."""
        fields = {
            "finish_reason": choice.finish_reason,
            "weight_versions": weight_versions(choice.spans),
            **_end_of(choice),
        }
        if self._has_prompt_logprobs(index):
            fields["prompt_logprobs"] = await self._prompt_logprobs(index)
        if self._body.return_token_ids:
            fields["token_ids"] = choice.token_ids
        if self._with_prompt:
            fields["prompt_token_ids"] = self._prompt(index)
        return fields | await self._sampling_mask(choice.logprobs) | await self._routing(choice.routed_experts)

    async def _event(self, index: int, delta: ChoiceDelta, choice: dict[str, Any]) -> dict[str, Any]:
        """Return one event of the stream. ``choice`` has the fields that depend on the subclass."""
        whole = self.generation.choices[index]
        choice["finish_reason"] = delta.finish_reason
        choice["weight_versions"] = weight_versions(delta.spans)
        if delta.finish_reason is not None:
            choice |= _end_of(whole)
        if self._routing_form is not None:
            choice |= await self._new_routing(index, delta)
        if self._asks_mask:
            choice |= await self._sampling_mask(delta.logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if index not in self._seen:
            self._seen.add(index)
            if self._has_prompt_logprobs(index):
                choice["prompt_logprobs"] = await self._prompt_logprobs(index)
            if self._with_prompt:
                choice["prompt_token_ids"] = self._prompt(index)
        event = self._head(self.event_kind)
        event["choices"] = [choice]
        event["weight_version"] = weight_version(delta.spans)
        if self._include_usage:
            event["usage"] = self._usage_so_far(index, delta) if self._continuous_usage else None
        return event

    async def _sampling_mask(self, entries: list[Logprob]) -> dict[str, msgspec.Raw]:
        """Return the ids that each token was drawn from, and their logprobs, in vLLM's shape, if they are asked for."""
        fields = {}
        if self._asks_mask:
            fields["sampling_mask"] = await mask_ids(self.generation.pace, entries)
        if self._asks_mask_logprobs:
            fields["sampling_mask_logprobs"] = await mask_logprobs(self.generation.pace, entries)
        return fields

    async def _routing(self, routed: RoutedExperts | None) -> dict[str, Any]:
        """Return the routing of tokens where its caller looks for it, if it is asked for and known."""
        if self._routing_form is None or routed is None:
            return {}
        encoded = await ENCODERS[self._routing_form](self.generation.pace, routed)
        if self._routing_form is not Form.SGLANG:
            return {"routed_experts": encoded}
        return {"sgl_ext": {"routed_experts": encoded, "routed_experts_start_len": routed.start}}

    async def _new_routing(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the routing that an event of a stream has: in our own form that of its tokens, so that nothing is lost
        if the stream breaks off; else that of all tokens in the last event of the choice."""
        whole = self.generation.choices[index]
        if self._routing_form is Form.NATIVE:
            return await self._routing(whole.new_routed_experts(delta.first + len(delta.token_ids)))
        return {} if delta.finish_reason is None else await self._routing(whole.routed_experts)

    def _prompt(self, index: int) -> list[int]:
        return self.generation.prompts[index // self.generation.n]

    def _has_prompt_logprobs(self, index: int) -> bool:
        """Return whether choice ``index`` carries the logprobs of its prompt: the first choice of each prompt does."""
        return self._body.prompt_logprobs is not None and index % self.generation.n == 0

    async def _prompt_logprobs(self, index: int) -> msgspec.Raw | None:
        """Return a JSON array in vLLM's shape: null for the first token, then {token id: {logprob, rank,
        decoded_token}} with the prompt's token first. None after an abort within the prompt, so that a client never
        gets fewer entries than its prompt has tokens."""
        entries = self.generation.choices[index].prompt_logprobs
        if entries is None:
            return None
        pairs = zip(self._prompt(index)[1:], entries, strict=True)
        items = (self._prompt_entry(token, entry) for token, entry in pairs)
        return await self.generation.pace.array(chain([None], items), 2 * work_of(entries))

    def _prompt_entry(self, token_id: int, entry: Logprob) -> dict[str, dict[str, Any]]:
        own = {token_id: (entry.logprob, entry.rank)}
        ranks: Iterable[int | None] = repeat(None) if self._asks_ids else count(1)
        best = {token: (logprob, rank) for rank, (token, logprob) in zip(ranks, entry.top, strict=False)}
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": self.token_text(token)}
            for token, (logprob, rank) in (own | best | own).items()
        }


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _end_of(choice: Choice) -> dict[str, Any]:
    """Return the fields that a choice has when it has ended."""
    end = {"stop_reason": choice.stop_reason, **version_bounds(choice.spans), "num_preempted": choice.num_preempted}
    return end | error_body(choice_error(choice)) if choice.finish_reason == "error" else end


def token_name(token_id: int) -> str:
    return f"token_id:{token_id}"
