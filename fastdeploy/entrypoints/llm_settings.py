"""The settings of the offline ``LLM``: ours, by our names and by FastDeploy's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.core.errors import InvalidField

OF_ENGINE, OF_REQUESTS = (frozenset(kind.__struct_fields__) for kind in (EngineConfig, ServeConfig))
MAX_WAITING = 1 << 20  # choices: one call may bring any number of prompts
# Names of FastDeploy that cannot matter here.
NO_EFFECT = frozenset({
    "revision", "port", "metrics_port", "engine_worker_queue_port", "cache_queue_port", "pd_comm_port",
    "rdma_comm_ports", "gpu_memory_utilization", "kv_cache_ratio", "swap_space", "use_warmup", "enable_chunked_prefill",
    "max_num_partial_prefills", "max_long_partial_prefills", "long_prefill_token_threshold", "static_decode_blocks",
    "prealloc_dec_block_slot_num_threshold", "dynamic_load_weight", "graph_optimization_config", "enable_logprob",
    "max_logprobs", "load_choices", "lm_head_fp32", "moe_gate_fp32", "logits_processors", "guided_decoding_backend",
    "skip_port_check", "enable_overlap_schedule", "enable_output_caching", "scheduler_name", "seed",
})  # fmt: skip
# Names of FastDeploy whose meaning cannot be given here, each with the values that ask for nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (None, 1),
    "data_parallel_size": (None, 1),
    "enable_expert_parallel": (None, False),
    "splitwise_role": (None, "mixed"),
    "ips": (None, ""),
    "load_strategy": (None, "normal", "meta", "ipc_snapshot"),
    "rsync_config": (None, {}),
    "enable_mm": (None, False),
    "limit_mm_per_prompt": (None, {}),
    "tool_parser_plugin": (None, ""),
    "early_stop_config": (None, {}),
    "enable_early_stop": (None, False),
    "plas_attention_config": (None, {}),
    "routing_replay_config": (None, {}),
}
VALUES: Mapping[str, Mapping[Any, Any]] = {
    "quantization": {"wint8": "int8", "None": None},
    "logprobs_mode": {"raw_logprobs": "raw", "processed_logprobs": "processed"},
}


class Settings(NamedTuple):
    """The settings of both sides of an ``LLM``."""

    engine: EngineConfig
    requests: ServeConfig


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of ours for names of ours and of FastDeploy. Raises InvalidField for a name that is unknown, or
    that asks for what is not here."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in OF_ENGINE | OF_REQUESTS:
            values = VALUES.get(name, {})
            found[name] = values.get(value, value) if isinstance(value, str) else value
        elif name in REFUSED:
            if not any(value == neutral and type(value) is type(neutral) for neutral in REFUSED[name]):
                raise InvalidField(name, "not supported by this engine")
        elif name not in NO_EFFECT:
            raise InvalidField(name, "unknown setting")
    return found


def checked_settings(model: str, given: Mapping[str, Any]) -> Settings:
    """Return the settings for the model of a folder. The limits that guard a server from its clients are off, since the
    caller is in the same process. Raises InvalidField."""
    found = {"model_roots": ("/",), "max_waiting": MAX_WAITING} | settings_of(given) | {"model": model}
    found = {name: value for name, value in found.items() if name == "model" or value is not None}
    engine, serve = ({k: v for k, v in found.items() if k in names} for names in (OF_ENGINE, OF_REQUESTS))
    unguarded = {"trust_request_chat_template": True, "max_reply_logprobs": 1 << 62}
    return Settings(_config(EngineConfig, engine).check(), _config(ServeConfig, serve | unguarded).check())


def _config(kind: Any, values: Mapping[str, Any]) -> Any:
    """Make a config, with the types of its fields checked."""
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).rpartition(" - at `$.")
        raise InvalidField(path.rstrip("`") or "settings", message.replace("`", "")) from error
