"""Loading of the model of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.loading import ShowLoading
from fastdeploy.core.runner import Runner

if TYPE_CHECKING:  # Paddle is imported only when a model is
    from fastdeploy.worker.memory_plan import ModelPlan


def load_runner(config: EngineConfig, show: ShowLoading = lambda state: None) -> Runner:
    """Load the model of ``config``. show: called with how far this is. Raises FastDeployError or OSError if it cannot
    be served."""
    from fastdeploy.worker.model_runner import ModelRunner

    return ModelRunner(
        config.model,
        **_plan_settings(config),
        max_num_batched_tokens=config.max_num_batched_tokens,
        spill_dir=config.spill_dir,
        model_roots=config.model_roots,
        max_lora_rank=config.max_lora_rank,
        standby_weights=config.standby_weights,
        show=show,
    )


def plan(config: EngineConfig) -> ModelPlan:
    """Plan the model of ``config`` as :func:`load_runner` does, and read no weights. Raises InvalidField."""
    from fastdeploy.model_executor import paddle
    from fastdeploy.worker.memory_plan import plan_model

    paddle.set_device("cpu")
    return plan_model(config.model, **_plan_settings(config))


def _plan_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that decide about memory, as ModelRunner and ``plan_model`` name them."""
    return {
        "dtype": config.dtype,
        "quantization": config.quantization,
        "block_size": config.block_size,
        "num_blocks": config.num_gpu_blocks_override,
        "kv_cache_bytes": None if config.kv_cache_gb is None else int(config.kv_cache_gb * 2**30),
        "memory_share": config.gpu_memory_utilization,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "engines_on_host": config.engines_on_host,
        "enable_return_routed_experts": config.enable_return_routed_experts,
    }
