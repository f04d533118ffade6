"""verl's own classes, unmodified, with the replicas of fastdeploy.rl.frameworks.verl. Run by test_verl.py in an
environment that has verl; prints one line of JSON.

usage: verl_child.py MODEL SAFETENSORS URL...      (SAFETENSORS: other weights of the same model. URL: two, or one for
both rollout replicas)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import ray
from hydra import compose, initialize_config_module
from in_time import get, in_time, tokens_made, unless_done
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient, LLMServerManager

BACKEND = "fastdeploy.rl.frameworks.verl_checkpoint_engine"
MAX_TOKENS = 1500
NUM_REPLICAS = 2  # rollout replicas; with one URL they share it


class Trainer(Worker):
    """The weight sync of a verl actor worker, without a model to train."""

    def __init__(self, weights: str):
        super().__init__()
        import importlib

        importlib.import_module(BACKEND)
        self._weights = weights
        self._engine = CheckpointEngineRegistry.new("fastdeploy", is_master=True, bucket_size=1 << 20)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto"):
        return await self._engine.send_weights(iter(load_file(self._weights).items()), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any):
        return getattr(self._engine, method)(*args, **kwargs)


def config(model: str, urls: list[str]) -> DictConfig:
    """Return verl's own defaults, with the changes that verl documents for another backend."""
    rollout = {
        "name": "fastdeploy",
        "nnodes": 1,
        "n_gpus_per_node": NUM_REPLICAS,
        "tensor_model_parallel_size": 1,
        "prompt_length": 64,
        "response_length": 400,
        "max_model_len": 2048,
        "engine_kwargs": {"fastdeploy": {"urls": urls}},
        "checkpoint_engine": {
            "backend": "fastdeploy",
            "custom_backend_module": BACKEND,
            "update_weights_bucket_megabytes": 1,
        },
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        defaults = compose("ppo_trainer")
    model_changes = {"path": model, "external_lib": "fastdeploy.rl.frameworks.verl"}
    changes = {"actor_rollout_ref": {"rollout": rollout, "model": model_changes}}
    OmegaConf.set_struct(defaults, False)
    return OmegaConf.merge(defaults, changes)


async def main(model: str, weights: str, urls: list[str]) -> dict[str, Any]:
    import fastdeploy.rl.frameworks.verl  # noqa: F401  as external_lib does

    cfg = config(model, urls)
    manager = await LLMServerManager.create(cfg)
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1, name_prefix="trainer")
    trainer = RayWorkerGroup(
        pool, RayClassWithInitArgs(ray.remote(Trainer), weights=weights), use_gpu=False, device_name="cpu"
    )
    sync = CheckpointEngineManager(
        omega_conf_to_dataclass(cfg.actor_rollout_ref.rollout.checkpoint_engine, CheckpointEngineConfig),
        trainer,
        manager.get_replicas(),
    )
    for replica in manager.get_replicas():
        await replica.server_handle.set_global_steps.remote(0)
    client: FullyAsyncLLMServerClient = manager.get_client(FullyAsyncLLMServerClient)
    plain: LLMServerClient = manager.get_client()
    params = {"temperature": 0.0, "logprobs": True, "ignore_eos": True, "max_tokens": MAX_TOKENS}
    prompts = [[40 + i for i in range(20)] + [100 + k] for k in range(4)]

    async def all_of(these: LLMServerClient) -> list[Any]:
        calls = (these.generate(f"r{k}", prompt_ids=p, sampling_params=params) for k, p in enumerate(prompts))
        return await asyncio.gather(*calls)

    alone = await all_of(plain)

    async def abort() -> tuple[asyncio.Task, list[dict[str, Any]]] | None:
        running = await started(all_of(client), urls)
        reports = [await replica.server_handle.abort_all_requests.remote() for replica in manager.get_replicas()]
        await sync.resume_generation_replicas()  # a pause without an update changes no answer
        if any(report["aborted_count"] for report in reports):
            return running, reports
        await running
        return None

    async def freeze() -> asyncio.Task | None:
        running = await started(all_of(client), urls)
        reports = [await post(f"{url}/v1/pause", hold_id="update", mode="keep") for url in urls]
        if sum(report["counts"]["kept"] for report in reports) == len(prompts):
            return running
        await release(urls)
        await running
        return None

    running, aborted = await in_time(abort)
    resumed = await running
    running = await in_time(freeze)
    metrics = await asyncio.to_thread(sync.update_weights, 7)
    await release(urls)
    straddling = await running
    after = await all_of(plain)
    await asyncio.to_thread(sync.update_weights)  # without a step
    unlabelled = await all_of(plain)
    asleep = []
    for change in (sync.release_kv_cache_replicas, sync.resume_kv_cache_replicas):
        await asyncio.to_thread(change)
        asleep.append([(await get(url, "/v1/weights"))["asleep"] for url in urls])
    epochs = [(await get(url, "/v1/weights"))["weight_epoch"] for url in urls]
    await asyncio.gather(*(colocated_update(cfg, rank, weights, 8) for rank in range(NUM_REPLICAS)))
    served = [await get(url, "/v1/weights") for url in urls]
    return {
        "max_tokens": MAX_TOKENS,
        "alone": [dump(o) for o in alone],
        "resumed": [dump(o) for o in resumed],
        "resumed_after_abort": sum(report["aborted_count"] for report in aborted),
        "aborted_ids": [report["request_ids"] for report in aborted],
        "straddling": [dump(o) for o in straddling if o.extra_fields["min_global_steps"] == 0],
        "after": [dump(o) for o in after],
        "unlabelled": [dump(o) for o in unlabelled],
        "metrics": sorted(metrics),
        "asleep": asleep,
        "colocated": [(w["version"], w["weight_epoch"] - epoch) for w, epoch in zip(served, epochs, strict=True)],
    }


async def colocated_update(cfg: DictConfig, replica_rank: int, weights: str, step: int) -> None:
    """Publish as a worker of a rollout replica does if trainer and rollout share a device (backend "naive")."""
    from fastdeploy.rl.frameworks.verl import FastDeployAdapter

    rollout, model = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.model
    adapter = FastDeployAdapter(omega_conf_to_dataclass(rollout), model, None, replica_rank=replica_rank)
    await adapter.update_weights(iter(load_file(weights).items()), global_steps=step)


async def post(url: str, **body: Any) -> Any:
    async with httpx.AsyncClient(verify=False, timeout=60) as client:
        return (await client.post(url, json=body)).raise_for_status().json()["result"]


async def release(urls: list[str]) -> None:
    for url in urls:
        await post(f"{url}/v1/resume", hold_id="update")


async def started(answers: Coroutine[Any, Any, list[Any]], urls: list[str]) -> asyncio.Task:
    """Start the answers, and wait until they have some tokens, or are whole."""

    async def made() -> float:
        return sum([await tokens_made(url) for url in urls])

    before, running = await made(), asyncio.create_task(answers)

    async def has_tokens() -> bool:
        return await made() >= before + 20

    await unless_done([running], has_tokens)
    return running


def dump(output: Any) -> dict[str, Any]:
    return {
        "ids": output.token_ids,
        "logprobs": output.log_probs,
        "stop": output.stop_reason,
        "steps": [output.extra_fields[f"{which}_global_steps"] for which in ("min", "max")],
    }


if __name__ == "__main__":
    root = str(Path(__file__).resolve().parents[3])
    environment = {"env_vars": {"PYTHONPATH": f"{root}:{root}/tests/rl/frameworks:{root}/tests/frameworks"}}
    # A fictitious device: verl reserves one per replica, and our replicas need none in this process.
    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    try:
        print("RESULT " + json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))), flush=True)
    finally:
        ray.shutdown()
    os._exit(0)
