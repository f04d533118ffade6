"""FastDeploy's description of the model that a trainer fills: ``RolloutModelConfig``."""

from __future__ import annotations

from typing import Any

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.errors import InvalidField

# Fields whose meaning cannot be given here, each with the values that ask for nothing, and what to do.
ONE_DEVICE = "an engine computes on one CPU; `fastdeploy fleet` starts many behind one address"
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_size": ((1,), ONE_DEVICE),
    "data_parallel_size": ((1,), ONE_DEVICE),
    "expert_parallel_size": ((1,), ONE_DEVICE),
    "enable_expert_parallel": ((False,), ONE_DEVICE),
    "splitwise_role": (("mixed",), "prefill and decode are done by the same engine"),
    "quantization": ((None, "", "wint8"), "the server makes 8-bit values of plain weights (--quantization int8)"),
    "enable_mm": ((False,), "models for text only"),
    "speculative_method": ((None, ""), "there is no draft model"),
    "num_nextn_predict_layers": ((0,), "there is no draft model"),
    "plas_attention_config": ((None,), "attention is over all tokens"),
    "routing_replay_config": ((None,), "the routing comes from a server with --enable-return-routed-experts"),
    "load_strategy": (("meta", "ipc_snapshot", "normal"), "weights reach a server by RolloutClient.publish"),
    "dtype": (("float32", "bfloat16"), "the server computes in one of these"),
}


class RolloutModelConfig:
    """The settings of a ``RolloutModel``, by FastDeploy's names and with its defaults; but tensor_parallel_size is 1.

    model_name_or_path: a checkpoint folder.
    dynamic_load_weight: True = the tensors take no memory until the trainer writes them; False = they are loaded.
    dtype, max_model_len, max_num_seqs, max_num_batched_tokens, enable_prefix_caching: those of an engine.
    lm_head_fp32: the output layer is float32.
    quantization: "wint8" has no effect, since the trainer writes plain weights, and the server quantizes them.

    All other settings are taken and have no effect, or are refused by name if they ask for what is not here
    (InvalidField)."""

    def __init__(
        self,
        model_name_or_path: str,
        max_model_len: int = 32768,
        tensor_parallel_size: int = 1,
        dynamic_load_weight: bool = True,
        load_strategy: str = "meta",
        enable_mm: bool = False,
        max_num_seqs: int = 34,
        total_block_num: int = 2000,
        block_size: int = 64,
        engine_worker_queue_port: str = "8002",
        device_ids: str = "0",
        dtype: str = "bfloat16",
        enc_dec_block_num: int = 1,
        kv_cache_ratio: float = 0.7,
        first_token_id: int = 1,
        gpu_memory_utilization: float = 0.9,
        engine_pid: int | None = None,
        do_profile: bool = False,
        pad_token_id: int = -1,
        eos_tokens_lens: int = 2,
        enable_chunked_prefill: bool = False,
        speculative_method: str | None = None,
        speculative_max_draft_token_num: int = 1,
        speculative_model_name_or_path: str | None = None,
        speculative_model_quantization: str = "WINT8",
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = False,
        splitwise_role: str = "mixed",
        expert_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        ori_vocab_size: int | None = None,
        quantization: dict[str, Any] | str | None = None,
        guided_decoding_backend: str = "off",
        disable_any_whitespace: bool = True,
        enable_logprob: bool = False,
        graph_optimization_config: Any = None,
        early_stop_config: Any = None,
        local_rank: int = 0,
        plas_attention_config: Any = None,
        data_parallel_size: int = 1,
        num_nextn_predict_layers: int = 0,
        eplb_config: Any = None,
        routing_replay_config: Any = None,
        load_choices: str = "default_v1",
        lm_head_fp32: bool = False,
        moe_gate_fp32: bool = True,
    ):
        given = {name: value for name, value in locals().items() if name != "self"}
        for name, (neutral, why) in NEUTRAL.items():
            if given[name] not in neutral:
                raise InvalidField(name, f"{given[name]!r} is not supported: {why}")
        self.model: str = given.pop("model_name_or_path")
        self.dtype, self.dynamic_load_weight, self.lm_head_fp32 = dtype, dynamic_load_weight, lm_head_fp32
        vars(self).update(given)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in vars(self).items())

    def initialize(self) -> EngineConfig:
        """Return the settings of an engine for this model. Raises InvalidField."""
        names = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
        return EngineConfig(model=self.model, **{name: getattr(self, name) for name in names}).check()
