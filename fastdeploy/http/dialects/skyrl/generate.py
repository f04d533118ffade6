"""POST /skyrl/v1/generate: vLLM's /inference/v1/generate, with the ids that each token was drawn from as an array."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.choice import Choice, ChoiceDelta
from fastdeploy.client.generation import Generation
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.outputs import Logprob
from fastdeploy.http.body import Body, parse_body, read_generation
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.vllm.generate import GenerateView, generate_schema, parse_generate
from fastdeploy.http.guards.route_access import RouteAccess
from fastdeploy.http.openai.completion import prepare
from fastdeploy.http.openai.protocol import CompletionBody
from fastdeploy.http.openapi import schema_of, streams, takes
from fastdeploy.http.routed_experts import Form

NO_ID, NO_LOGPROB = struct.pack("<i", -1), struct.pack("<f", -float("inf"))


class SupportBody(Body):
    """The fields that vLLM's route does not have."""

    return_sample_support: bool = False
    return_sample_support_logprobs: bool = False


def add_routes(router: APIRouter, context: ServingContext) -> None:
    schema = generate_schema()
    schema["properties"] |= schema_of(SupportBody)["properties"]

    @router.post("/skyrl/v1/generate", openapi_extra=takes(schema), responses=streams())
    @RouteAccess.DATA
    async def generate(request: Request) -> Response:
        """Generate from token ids. SkyRL cannot ask for the routed experts: a server that has them returns them."""
        data = await read_generation(request)
        support = parse_body({k: data.pop(k) for k in SupportBody.model_fields if k in data}, SupportBody, {})
        body = parse_generate(with_support(data, support))
        if body.routed_experts is None and context.client.model_info.get("routed_experts"):
            body = body.model_copy(update={"routed_experts": True})
        checked = await prepare(context, body, default_max_tokens=None)
        generation = Generation(context.client, context.tokenizer, checked, context.pace())
        return SkyRLView(context, generation, body, support).response()


def with_support(data: dict[str, Any], support: SupportBody) -> dict[str, Any]:
    """Return the body of vLLM's route that also asks for the best tokens of the distribution that is drawn from: as
    many as top_k, which are all that can be drawn, or as many as ``logprobs`` names. Raises InvalidField."""
    if support.return_sample_support_logprobs and not support.return_sample_support:
        raise InvalidField("return_sample_support_logprobs", "expected return_sample_support with it")
    sampling = data.get("sampling_params") or {}
    if not support.return_sample_support or not isinstance(sampling, dict):
        return data
    top_k, logprobs, temperature = (sampling.get(name) for name in ("top_k", "logprobs", "temperature"))
    bounded = isinstance(top_k, int) and top_k > 0
    width = top_k if bounded else logprobs
    if not isinstance(width, int) or width < 1 or (bounded and width < 2) or temperature == 0:
        expected = "expected a temperature above 0, and top_k > 1 (or top_k -1, and logprobs > 0) with it"
        raise InvalidField("return_sample_support", expected)
    return data | {"sampling_params": sampling | {"logprobs": width, "logprobs_mode": "processed"}}


class SkyRLView(GenerateView):
    """The reply of vLLM's route with rollout_sample_support, [tokens, top_k], and SkyRL's form of routed_experts."""

    def __init__(self, context: ServingContext, generation: Generation, body: CompletionBody, support: SupportBody):
        super().__init__(context, generation, body)
        self._support = support
        self._routing_form = Form.SKYRL if body.routed_experts else None

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shown = await super().choice(index, choice)
        return shown | {"routed_experts": None} | self._packed(choice.logprobs)

    async def events(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        events = await super().events(index, delta)
        events[0]["choices"][0] |= self._packed(delta.logprobs)
        return events

    def _packed(self, entries: list[Logprob]) -> dict[str, Any]:
        wanted, width = self._support, self._body.logprobs or 0
        ids = packed((entry.top_ids for entry in entries), len(entries), width, NO_ID, "int32")
        logprobs = packed((entry.top_logprobs for entry in entries), len(entries), width, NO_LOGPROB, "float32")
        return {
            "rollout_sample_support": ids if wanted.return_sample_support else None,
            "rollout_sample_support_logprobs": logprobs if wanted.return_sample_support_logprobs else None,
        }


def packed(rows: Iterable[bytes], count: int, width: int, fill: bytes, dtype: str) -> dict[str, Any]:
    """Return an array [count, width] of 4-byte numbers in SkyRL's form. rows: each is filled up with ``fill``. SkyRL
    looks for the base64 text in the first field."""
    data = b"".join(row + fill * (width - len(row) // 4) for row in rows)
    return {"data": base64.b64encode(data).decode(), "shape": [count, width], "dtype": dtype}
