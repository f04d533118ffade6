"""SkyRL's own client and weight-sync client, unmodified, on one of our servers. Run by test_skyrl.py in the environment
of the frameworks; prints one line of JSON.

usage: skyrl_child.py URL FOLDER      (FOLDER: other weights of the served model)
"""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from typing import Any

import typing_extensions

if sys.version_info < (3, 12):
    # SkyRL 0.4 requires Python 3.12, only since pydantic accepts typing's TypedDict there.
    typing.TypedDict = typing_extensions.TypedDict

import aiohttp
import httpx
from in_time import in_time, unless_done
from safetensors.torch import load_file
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient

from fastdeploy.rl.frameworks.skyrl import FastDeployWeightSender

TOKENS = 1500
PROMPTS = [[40 + i for i in range(20)] + [100 + k] for k in range(4)]
SAMPLING = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}


async def main(url: str, folder: str) -> dict[str, Any]:
    # data_parallel_size has no default; the model is named "default" unless given.
    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1)
    sync = SkyrlWeightSyncClient([url])
    results: dict[str, Any] = {"tokens": TOKENS, "world": await client.get_world_size()}

    async def generate() -> dict[str, Any]:
        batch = {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING, "session_ids": [f"s{k}" for k in range(4)]}
        out = await client.generate(batch)
        return {"ids": out["response_ids"], "logprobs": out["response_logprobs"], "stops": out["stop_reasons"],
                "texts": out["responses"]}  # fmt: skip

    results["alone"] = await generate()

    async def all_run() -> bool:
        return await running_requests(url) == len(PROMPTS)

    async def attempt() -> asyncio.Task | None:
        running = asyncio.create_task(generate())
        if await unless_done([running], all_run):
            await client.pause_generation()
            if await all_run():
                return running
            await client.resume_generation()
        await running
        return None

    running = await in_time(attempt)
    results["frozen"] = [await running_requests(url), not running.done()]
    await client.resume_generation()
    results["kept"] = await running

    running = await in_time(attempt)
    await client.sleep_for_weight_sync(offload_kv=True)
    results["asleep"] = [await asleep(url)]
    await client.wake_for_weight_sync(tags=["weights"])
    await asyncio.to_thread(sync.init_weight_transfer_engine, {"backend": "checkpoint"})
    await asyncio.to_thread(sync.start_weight_update)
    await asyncio.to_thread(sync.update_weights, {"model_path": folder})
    await asyncio.to_thread(sync.finish_weight_update, "step-1")
    await client.wake_for_weight_sync(tags=["kv_cache"])
    results["asleep"].append(await asleep(url))
    await client.resume_generation()
    results["straddling"] = await running
    results["version"] = await version(url)
    results["after"] = await generate()

    sender = FastDeployWeightSender(client.server_urls, load_file(f"{folder}/model.safetensors").items())
    sender.skyrl_set_reset_prefix_cache(True)
    await client.pause_generation()
    await asyncio.to_thread(sender.send_weights)
    await client.resume_generation()
    results["sent_version"] = await version(url)
    results["again"] = await generate()

    body = {"prompt": {"chunks": [{"tokens": PROMPTS[0]}]}, "num_samples": 2, "include_prompt_logprobs": True,
            "sampling_params": {"max_tokens": 5, "temperature": 1.0, "seed": 3}}  # fmt: skip
    sample = await client.sample({"json": body})
    results["sample"] = [[len(s["tokens"]), len(s["logprobs"])] for s in sample["sequences"]]
    results["prompt_logprobs"] = len(sample["prompt_logprobs"])
    results["tokenized"] = await client.detokenize(await client.tokenize(["hello there"]))
    results["refused"] = []
    for refused in (
        client.load_lora_adapter("mine", "/nowhere"),
        asyncio.to_thread(sync.init_weight_transfer_engine, {"local_checkpoint_dir": "/x", "base_model_path": "/y"}),
        asyncio.to_thread(sync.fetch_weights, 1, "/sync"),
    ):
        try:
            await refused
        except (aiohttp.ClientResponseError, RuntimeError) as error:
            results["refused"].append(str(error))
    await client.finish_session("s0")
    await client.sleep(level=1)
    results["sleeping"] = [await client.is_sleeping()]
    await client.wake_up()
    results["sleeping"].append(await client.is_sleeping())
    await client.aclose()
    sync.close()
    return results


async def get(url: str) -> Any:
    async with httpx.AsyncClient(verify=False) as client:  # fast to make
        return (await client.get(url)).json()


async def running_requests(url: str) -> int:
    return (await get(f"{url}/v1/loads"))["loads"][0]["num_running_reqs"]


async def asleep(url: str) -> list[str]:
    return (await get(f"{url}/v1/weights"))["result"]["asleep"]


async def version(url: str) -> str:
    return (await get(f"{url}/v1/weights"))["result"]["version"]


if __name__ == "__main__":
    print("RESULT " + json.dumps(asyncio.run(main(*sys.argv[1:]))), flush=True)
