"""AReaL's own remote inference engine, unmodified, with both of its backends, on one of our servers. Run by
test_areal.py in the environment of the frameworks; prints one line of JSON.

usage: areal_child.py URL FOLDER...      (FOLDER: other weights of the served model, one per backend)
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import torch
from areal.api import ModelRequest, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.engine.sglang_remote import SGLangBackend
from areal.engine.vllm_remote import VLLMBackend
from areal.infra import RemoteInfEngine
from areal.utils import name_resolve, names
from in_time import aborted, in_time, tokens_made, unless_done

TOKENS = 600
PROMPT = list(range(40, 60))


async def with_backend(name: str, backend: Any, url: str, folder: str) -> dict[str, Any]:
    config = InferenceEngineConfig(
        experiment_name="e", trial_name=name, max_concurrent_rollouts=4, pause_grace_period=0.0, setup_timeout=60
    )
    engine = RemoteInfEngine(config, backend)
    engine.initialize(engine_id=name, addr=urlsplit(url).netloc, train_data_parallel_size=1)

    async def generate() -> dict[str, Any]:
        settings = GenerationHyperparameters(max_new_tokens=TOKENS, greedy=True, ignore_eos=True, max_tokens=4000)
        reply = await engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=settings))
        return {"ids": reply.output_tokens, "logprobs": reply.output_logprobs, "stop": reply.stop_reason,
                "versions": sorted(set(reply.output_versions))}  # fmt: skip

    results: dict[str, Any] = {"tokens": TOKENS, "alone": await generate()}

    async def attempt() -> asyncio.Task | None:
        before, tokens = await aborted(url), await tokens_made(url)

        async def has_tokens() -> bool:
            return await tokens_made(url) >= tokens + 5

        running = asyncio.create_task(generate())
        if await unless_done([running], has_tokens):
            await asyncio.to_thread(engine.pause_generation)
            if await aborted(url) > before:
                return running
            await asyncio.to_thread(engine.continue_generation)
        await running
        return None

    running = await in_time(attempt)
    await asyncio.to_thread(engine.continue_generation)
    results["resumed"] = await running

    running = await in_time(attempt)
    meta = WeightUpdateMeta(type="disk", path=folder, version=1, clear_checkpoint_after_load=False)
    saved = names.update_weights_from_disk("e", name, engine.get_version())
    name_resolve.add(saved, str(datetime.now().timestamp()), keepalive_ttl=120)
    await asyncio.to_thread(engine.update_weights_from_disk(meta).result)
    engine.set_version(1)
    await asyncio.to_thread(engine.continue_generation)
    results["straddling"] = await running
    results["after"] = await generate()
    if name == "sglang":
        mask = torch.tensor([[0] * 10 + [1] * 10])
        (scores,) = engine.compute_logp([{"input_ids": torch.tensor([PROMPT]), "loss_mask": mask}])
        results["scored"] = int((scores < 0).sum())
    engine.destroy()
    return results


async def main(url: str, folders: list[str]) -> dict[str, Any]:
    # The key by which AReaL's trainer announces a saved checkpoint to its rollout side.
    with tempfile.TemporaryDirectory() as records:
        name_resolve.reconfigure(NameResolveConfig(nfs_record_root=records))
        return {
            "sglang": await with_backend("sglang", SGLangBackend(), url, folders[0]),
            "vllm": await with_backend("vllm", VLLMBackend(), url, folders[1]),
        }


if __name__ == "__main__":
    print("RESULT " + json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2:]))), flush=True)
