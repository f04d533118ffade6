"""slime's delta trainer (UpdateWeightFromDiskDelta, with its SGLangEngine), unmodified, on one of our servers. Run by
test_slime_deltas.py in the environment of the frameworks; prints one line of JSON.

usage: slime_child.py SLIME URL MODEL FOLDER      (SLIME: a checkout; FOLDER: for all files, below the server's roots)

Replaced, since they need CUDA or are no Python packages: Megatron (one rank, whose parameters have the names of Hugging
Face), SGLang (two names that the engine imports) and Ray's actors (calls run here, at once).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from delta_runs import Engine, Policy, spoil

VERSIONS = 5
RUNS = (("xor", "xxh3-128"), ("overwrite", "blake3"), ("overwrite", "adler32"), ("xor", "blake3"))


def stub(name: str, **names: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update({"__path__": [], **names})
    sys.modules[name] = module


def package(name: str, folder: str) -> None:
    """Let ``name`` be a package whose modules are slime's, but whose __init__ does not run."""
    stub(name, __path__=[folder])


@dataclasses.dataclass
class ServerArgs:
    """The fields of SGLang's ServerArgs that slime's engine looks at."""

    model_path: str = ""
    dtype: str = "auto"
    enable_memory_saver: bool = False
    host: str = ""
    port: int = 0
    node_rank: int = 0
    enable_return_routed_experts: bool = False


def stub_what_is_missing(slime: str) -> None:
    sys.path.insert(0, slime)
    stub("sglang")
    stub("sglang.srt")
    stub("sglang.srt.server_args", ServerArgs=ServerArgs)
    stub("sglang.srt.utils", kill_process_tree=None)
    rank_zero = dict.fromkeys(
        ("get_data_parallel_rank", "get_tensor_model_parallel_rank", "get_pipeline_model_parallel_rank"),
        lambda *_, **__: 0,
    )
    stub("megatron")
    stub("megatron.core", mpu=types.SimpleNamespace(**rank_zero))
    stub("megatron.core.transformer")
    stub("megatron.core.transformer.transformer_layer", get_transformer_layer_offset=None)
    megatron_utils = "slime.backends.megatron_utils"
    package(megatron_utils, f"{slime}/slime/backends/megatron_utils")
    stub(f"{megatron_utils}.misc_utils", strip_param_name_prefix=None)
    stub(f"{megatron_utils}.megatron_to_hf", convert_to_hf=lambda _args, _model, name, param, _config: [(name, param)])


class Handle:
    """A Ray handle of an object in this process: ``handle.method.remote()`` calls the method at once."""

    def __init__(self, target: Any):
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=getattr(self._target, name))


def make_args(url: str, model: str, folder: Path, encoding: str, checksum: str) -> argparse.Namespace:
    return argparse.Namespace(
        num_gpus_per_node=8, rollout_num_gpus_per_engine=1, colocate=False, debug_rollout_only=False, seed=1,
        fp16=False, actor_num_gpus_per_node=1, actor_num_nodes=1, sglang_pp_size=1, sglang_dp_size=1, sglang_ep_size=1,
        hf_checkpoint=model, offload_rollout=False, use_rollout_routing_replay=False, rollout_external=True,
        sglang_router_ip=None, sglang_router_port=None, update_weight_buffer_size=1 << 20,
        update_weight_disk_dir=str(folder / "published"), update_weight_local_checkpoint_dir=str(folder / "local"),
        update_weight_delta_encoding=encoding, update_weight_delta_checksum=checksum,
        custom_update_weight_post_write_path=f"{__name__}.after_write",
    )  # fmt: skip


def after_write(_args: Any, folder: str, _engines: Any) -> None:
    """slime's hook between the writing of a version and the calls of the engines."""
    if folder.endswith(f"{VERSIONS + 1:06d}"):
        spoil(Path(folder))


class Trainer:
    """One run of slime's trainer."""

    def __init__(self, url: str, model: str, folder: Path, encoding: str, checksum: str):
        from slime.backends.megatron_utils.update_weight import update_weight_from_disk_delta as module
        from slime.backends.megatron_utils.update_weight import update_weight_from_distributed as base
        from slime.backends.sglang_utils.external import discover_external_engines, external_engine_init_kwargs
        from slime.backends.sglang_utils.sglang_engine import SGLangEngine

        args = make_args(url, model, folder, encoding, checksum)
        found = discover_external_engines([url.removeprefix("http://")])[0]
        engine = SGLangEngine(args=args, rank=0, worker_type="regular", base_gpu_id=0, num_gpus_per_engine=1)
        engine.init(**external_engine_init_kwargs(found), router_ip=None, router_port=None)
        module.ray = types.SimpleNamespace(get=lambda results: results)
        base.named_params_and_buffers = lambda _args, _model: self._policy
        base.all_gather_param = lambda _name, param: param
        self._policy = Policy(model)
        self._updater = module.UpdateWeightFromDiskDelta(
            args, [], lambda: self._policy.tensors, model_name="qwen3", quantization_config=None
        )
        self._updater.connect_rollout_engines([Handle(engine)], None)
        self._updater.update_weights()  # the first call publishes nothing

    def step(self) -> dict[str, torch.Tensor]:
        """Change some values, publish, and let the engine load them."""
        self._policy.step()
        self._updater.update_weights()
        return self._policy.tensors


def run(url: str, model: str, folder: Path, encoding: str, checksum: str) -> dict[str, Any]:
    engine = Engine(url, model)
    trainer = Trainer(url, model, folder, encoding, checksum)
    deltas, steps = [], []
    for _ in range(VERSIONS):
        steps.append(trainer.step())
        deltas.append(engine.state())
    try:
        trainer.step()
        error = ""
    except Exception as raised:
        error = " ".join([str(raised), *raised.__notes__])  # slime adds the text of the reply as a note
    after = engine.state()
    name = f"whole-{encoding}-{checksum}"
    wholes = [engine.load(tensors, folder / f"{name}-{version}", version) for version, tensors in enumerate(steps, 1)]
    return {"run": [encoding, checksum], "deltas": deltas, "wholes": wholes, "error": error, "after": after}


def main(slime: str, url: str, model: str, folder: str) -> list[dict[str, Any]]:
    stub_what_is_missing(slime)
    from slime.utils import accelerator
    from slime.utils.distributed_utils import init_gloo_group

    accelerator.resolve_visible_device_id = lambda index: index
    accelerator.current_device = lambda: "cpu"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_gloo_group()
    return [run(url, model, Path(folder), *formats) for formats in RUNS]


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*sys.argv[1:])), flush=True)
