"""The routing of a mixture of experts, read by the clients of SkyRL and of prime-rl, and by the sample of slime. Run by
test_routing.py in the environment of the frameworks; prints one line of JSON.

usage: routing_child.py URL REQUEST [SLIME]     (REQUEST: JSON, see test_routing.py; SLIME: a checkout)
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import types
import typing
from typing import Any

import typing_extensions

if sys.version_info < (3, 12):
    # SkyRL 0.4 requires Python 3.12, only since pydantic accepts typing's TypedDict there.
    typing.TypedDict = typing_extensions.TypedDict

import httpx
import numpy as np


class TokensOnly:
    """A renderer for prompts that are token ids already."""

    supports_tools = False

    def get_stop_token_ids(self) -> list[int]:
        return []

    def parse_response(self, *_: Any, **__: Any) -> Any:
        return types.SimpleNamespace(content="", reasoning_content=None, tool_calls=[], reasoning_complete=True)


async def with_skyrl(url: str, model: str, request: dict[str, Any]) -> dict[str, Any]:
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteGenerateClient

    client = RemoteGenerateClient(proxy_url=url)
    answers = [
        await client.generate(
            prompt_token_ids=request["ids"], sampling_params=request["sampling"], session_id=None, model=model,
            return_routed_experts=True, routed_experts_prompt_start=start,
        )
        for start in (None, request["start"])
    ]  # fmt: skip
    whole, part = (np.asarray(answer.routed_experts).tolist() for answer in answers)
    return {"tokens": answers[0].response_ids, "whole": whole, "part": part}


async def with_renderers(url: str, model: str, request: dict[str, Any]) -> dict[str, Any]:
    from openai import AsyncOpenAI
    from renderers.client import generate

    sampling = {**request["sampling"], "routed_experts_prompt_start": request["start"]}
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await generate(
            client=client, renderer=TokensOnly(), model=model, messages=[], prompt_ids=request["ids"],
            sampling_params=sampling,
        )  # fmt: skip
    routed = answer["routed_experts"]
    array = np.frombuffer(base64.b64decode(routed["data"]), routed["dtype"]).reshape(routed["shape"])
    return {"tokens": answer["completion_ids"], "start": routed["start"], "part": array.tolist()}


def with_slime(url: str, slime: str, request: dict[str, Any]) -> dict[str, Any]:
    sys.path.insert(0, slime)
    from slime.utils.types import Sample

    asked = {"max_new_tokens": request["sampling"]["max_tokens"], "temperature": 0, "ignore_eos": True}
    args = types.SimpleNamespace(num_layers=request["layers"], moe_router_topk=request["top_k"])
    sample = Sample(tokens=list(request["ids"]))

    def turn(**more: Any) -> None:
        body = {"input_ids": sample.tokens, "sampling_params": asked, "return_logprob": True, **more}
        reply = httpx.post(f"{url}/generate", json=body | {"return_routed_experts": True}, timeout=60)
        meta = reply.raise_for_status().json()["meta_info"]
        logprobs, tokens = zip(*((entry[0], entry[1]) for entry in meta["output_token_logprobs"]), strict=True)
        sample.append_response_tokens(args, tokens=tokens, log_probs=logprobs, meta_info=meta)

    turn()
    first = sample.rollout_routed_experts.tolist()
    turn(routed_experts_start_len=len(sample.tokens) - 1)
    return {"tokens": sample.tokens, "first": first, "both": sample.rollout_routed_experts.tolist()}


async def main(url: str, request: dict[str, Any], slime: str = "") -> dict[str, Any]:
    if slime:
        return {"slime": with_slime(url, slime, request)}
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    return {
        "skyrl": await with_skyrl(url, model, request),
        "renderers": await with_renderers(url, model, request),
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:]))))
