"""One sync of weights by verl's checkpoint manager and our checkpoint engine, as verl's trainer sees it. Run by
test_silent_syncs.py; prints one line of JSON.

usage: verl_sync_child.py MODEL FOLDER URL      (FOLDER: the new weights of MODEL)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.llm_server import LLMServerManager
from verl_child import Trainer, config


async def main(model: str, folder: str, url: str) -> dict[str, Any]:
    import fastdeploy.rl.frameworks.verl  # noqa: F401  as external_lib does

    settings = config(model, [url])
    replicas = (await LLMServerManager.create(settings)).get_replicas()
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1, name_prefix="trainer")
    worker = RayClassWithInitArgs(ray.remote(Trainer), weights=str(Path(folder, "model.safetensors")))
    trainer = RayWorkerGroup(pool, worker, use_gpu=False, device_name="cpu")
    sync = settings.actor_rollout_ref.rollout.checkpoint_engine
    manager = CheckpointEngineManager(omega_conf_to_dataclass(sync, CheckpointEngineConfig), trainer, replicas)
    try:
        await asyncio.to_thread(manager.update_weights, 7)
        return {"error": ""}
    except Exception as raised:
        return {"error": str(raised)}


if __name__ == "__main__":
    # A fictitious device: verl reserves one per replica, and our replicas need none in this process.
    variables = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, runtime_env=variables, log_to_driver=False)
    try:
        print("RESULT " + json.dumps(asyncio.run(main(*sys.argv[1:]))), flush=True)
    finally:
        ray.shutdown()
    os._exit(0)
