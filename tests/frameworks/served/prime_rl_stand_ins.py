"""A pytest plugin: prime-rl's client reads replies with a class of vLLM, which needs CUDA builds. Here is another."""

from __future__ import annotations

import sys
import types

import pydantic

MODULE = "vllm.entrypoints.scale_out.token_in_token_out.protocol"


class Logprob(pydantic.BaseModel):
    logprob: float


class GenerateResponse(pydantic.BaseModel):
    """The fields of a reply of /inference/v1/generate that prime-rl reads."""

    request_id: str
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


names = MODULE.split(".")
for depth in range(1, len(names) + 1):
    module = types.ModuleType(".".join(names[:depth]))
    module.__path__ = []
    sys.modules[module.__name__] = module
sys.modules[MODULE].GenerateResponse = GenerateResponse
