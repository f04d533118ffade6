"""Loading of the model of a config."""

from __future__ import annotations

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.runner import Runner


def load_runner(config: EngineConfig) -> Runner:
    """Load the model of ``config``. Raises FastDeployError or OSError if it cannot be served."""
    from fastdeploy.worker.model_runner import ModelRunner

    return ModelRunner(
        config.model,
        dtype=config.dtype,
        quantization=config.quantization,
        block_size=config.block_size,
        num_blocks=config.num_gpu_blocks_override,
        kv_cache_bytes=None if config.kv_cache_gb is None else int(config.kv_cache_gb * 2**30),
        memory_share=config.gpu_memory_utilization,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        spill_dir=config.spill_dir,
        model_roots=config.model_roots,
        max_lora_rank=config.max_lora_rank,
        standby_weights=config.standby_weights,
        engines_on_host=config.engines_on_host,
    )
