"""SkyRL's delta trainer (DeltaTrainerWeightTransferEngine, with its publisher and its SkyrlWeightSyncClient),
unmodified, on one of our servers. Run by test_skyrl_deltas.py in the environment of the frameworks; prints one line of
JSON.

usage: skyrl_deltas_child.py URL MODEL FOLDER      (FOLDER: for all files, below the server's roots)

Replaced: the base classes of vLLM, which is not installed. They hold what the trainer gives them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import typing_extensions
from delta_runs import Engine, Policy, spoil
from safetensors.torch import load_file

if sys.version_info < (3, 12):
    # SkyRL 0.4 requires Python 3.12, only since pydantic accepts typing's TypedDict there.
    typing.TypedDict = typing_extensions.TypedDict

VERSIONS = 5
Info = TypeVar("Info")


class TrainerInitInfo:
    """vLLM's. is_sender: this rank drives the servers."""

    is_sender = True


class TrainerWeightTransferEngine(Generic[Info]):
    """vLLM's: keeps its arguments."""

    def __init__(self, *, client: Any, source: Any, is_sender: bool):
        self.client, self.source, self.is_sender = client, source, is_sender


def stub_vllm() -> None:
    names = {"TrainerInitInfo": TrainerInitInfo, "TrainerWeightTransferEngine": TrainerWeightTransferEngine,
             "VLLMWeightSyncClient": Any, "WeightSource": Any}  # fmt: skip
    parts = {"packed_tensor": {"DEFAULT_PACKED_BUFFER_SIZE_BYTES": 1}, "base": names}
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for part, content in parts.items():
        module = types.ModuleType(part)
        module.__dict__.update(content)
        sys.modules[f"vllm.distributed.weight_transfer.{part}"] = module


def main(url: str, model: str, folder: Path) -> dict[str, Any]:
    stub_vllm()
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient
    from skyrl.backends.skyrl_train.weight_sync.delta.trainer import (
        DeltaTrainerInitInfo,
        DeltaTrainerWeightTransferEngine,
    )

    engine, policy, client = Engine(url, model), Policy(model), SkyrlWeightSyncClient([url])
    info = DeltaTrainerInitInfo(
        base_model_path=model, sync_dir=str(folder / "sync"), local_checkpoint_dir=str(folder / "local"),
        publish_staging_dir=str(folder / "staging"),
    )  # fmt: skip
    trainer = DeltaTrainerWeightTransferEngine.trainer_init(info, client=client, source=policy)
    trainer.skyrl_set_reset_prefix_cache(True)
    deltas, steps = [], []
    for _ in range(VERSIONS):
        policy.step()
        trainer.send_weights()
        steps.append(policy.tensors)
        deltas.append(engine.state())

    policy.step()
    publish = trainer._publisher.publish

    def publish_and_spoil(results: Any) -> dict[str, Any]:
        published = publish(results)
        spoil(Path(published["uri"]))
        return published

    trainer._publisher.publish = publish_and_spoil
    try:
        trainer.send_weights()
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    after = engine.state()

    async def fetch_again() -> Any:
        remote = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1)
        try:
            return await remote.fetch_weights(target_version=VERSIONS, sync_dir=str(folder / "sync"))
        finally:
            await remote.aclose()

    again = asyncio.run(fetch_again())
    wholes = [engine.load(tensors, folder / f"whole-{version}", version) for version, tensors in enumerate(steps, 1)]
    local = load_file(folder / "local" / "weights" / "model.safetensors")
    same = local.keys() == steps[-1].keys() and all(torch.equal(local[name], steps[-1][name]) for name in local)
    return {"deltas": deltas, "wholes": wholes, "error": error, "after": after, "again": [str(again), same]}


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))), flush=True)
