"""The flags of PaddlePaddle/FastDeploy (release 2.6 and develop), and what becomes of each here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastdeploy.entrypoints.cli.foreign import Foreign, Form, differs, no_effect, refused, same, whole_number

SWITCH, TOGGLE, MANY = Form.SWITCH, Form.TOGGLE, Form.MANY
ONE_ENGINE = "an engine computes on one CPU; `fastdeploy fleet --replicas N` starts many behind one address"
NO_SPLIT = "prefill and decode are done by the same engine; leave it out"
ONE_WAY = "one process computes all experts, in one way"
NO_IMAGES = "requests hold text only"
NO_REDIS = "of the global scheduler, which is not here"
SOCKETS = "processes talk over Unix sockets; no port is opened"
KV_SPLIT = "the KV cache has no parts for prompts and outputs"
PREFILL = "prompts are always read in pieces; `--max-num-batched-tokens` and `--max-step-ms` bound a step"
POOLING = "models that generate text only"
# Of FastDeploy's own: what they do, a request asks for by its fields.
PROCESSORS = tuple(
    f"{place}{name}logitsprocessor"
    for name in ("logitbias", "thinkingbudget")
    for place in ("", "fastdeploy.model_executor.logits_processor:")
)
NGRAM_METHODS = (None, "", "naive", "ngram", "suffix")

# Values of our own flags that are FastDeploy's: what they mean here.
VALUES: Mapping[str, Mapping[str, str]] = {
    "logprobs_mode": {"raw_logprobs": "raw", "processed_logprobs": "processed"},
    "quantization": {"wint8": "int8"},
    "reasoning_parser": {"ernie-x1": "ernie45", "ernie-45-vl": "qwen3", "ernie-45-vl-thinking": "qwen3"},
    "tool_call_parser": {"ernie-x1": "ernie45", "ernie-45-vl-thinking": "ernie45"},
}
# Values of our own flags that are FastDeploy's and refused: why, and what to use.
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "logprobs_mode": dict.fromkeys(
        ("raw_logits", "processed_logits"), "logits are not sent; use raw_logprobs or processed_logprobs"
    ),
    "quantization": dict.fromkeys(
        ("wint4", "wfp8afp8", "block_wise_fp8", "w4afp8", "w4a8", "mix_quant"),
        "8-bit integers are the only quantization; use wint8",
    ),
}


def _connections(text: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Share the connections among the API servers, each of which counts its own."""
    return {"max_connections": max(-(-whole_number(text) // max(int(settings["workers"]), 1)), 1)}


def _shutdown(text: str, _: Mapping[str, Any]) -> dict[str, Any]:
    seconds = whole_number(text)
    return {"shutdown_s": float(seconds)} if seconds > 0 else {}


def _waiting(text: str, _: Mapping[str, Any]) -> dict[str, Any]:
    number = whole_number(text)
    return {"max_waiting": number} if number > 0 else {}


def _json_object(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"expected a JSON object, got {text!r}")
    return config


def _routing(text: str, _: Mapping[str, Any]) -> dict[str, Any]:
    config = {} if text == "null" else _json_object(text)
    if not config.get("enable_routing_replay"):
        return {}
    if (store := config.get("routing_store_type", "local")) != "response":
        raise ValueError(f"replies have the routing, so routing_store_type {store!r} is not here; use response")
    return {"enable_return_routed_experts": True}


def _speculation(text: str, _: Mapping[str, Any]) -> dict[str, Any]:
    config = _json_object(text)
    if (method := config.get("method")) not in NGRAM_METHODS:
        raise ValueError(f"there is no draft model, so method {method!r} is not here; leave the flag out, or use ngram")
    return {"enable_speculative_decoding": method in ("ngram", "suffix")}


FLAGS: tuple[Foreign, ...] = (
    # HTTP
    differs("port", "8180, and not 8000, without it"),
    differs("host", "127.0.0.1, and not 0.0.0.0, without it. On others, control routes need `--control-key`"),
    differs("workers", "1, and not 4, without it"),
    same("metrics_port"),
    no_effect("controller_port", "the control routes are at `--port`, or at `--control-port`"),
    no_effect("max_waiting_time", "no request waits for a connection: above `--max-connections` it gets 429 at once"),
    differs("max_concurrency", "`--max-connections`, divided by `--workers`: open connections, then 429", _connections),
    no_effect("enable_mm_output", NO_IMAGES, SWITCH),
    differs(
        "timeout_graceful_shutdown",
        "`--shutdown-s`: requests end as aborted at once; `/v1/pause` with mode `wait` lets them run to their end "
        "first. 0 leaves it as it is",
        _shutdown,
    ),
    no_effect("timeout", "processes that end or hang are replaced; `--stall-s` is the engine's limit"),
    differs("api_key", "a key, or a file of keys; repeatable. It opens data routes; `--control-key FILE` opens all"),
    same("config", "YAML. Unknown keys are refused; flags are stronger, wherever they stand"),
    # Model
    differs("model", "a folder on this machine; nothing is downloaded"),
    same("served_model_name", "without it, the name of the folder"),
    no_effect("revision", "the folder is served as it is"),
    refused("model_config_name", "the file is `config.json`", "config.json"),
    refused("tokenizer", "the tokenizer is read from the model's folder; put its files there", ""),
    refused("tokenizer_base_url", "the API servers have the tokenizer themselves", ""),
    differs("max_model_len", "without it, as much as the model and the KV cache allow, and not 2048"),
    differs("block_size", "16, and not 64, without it; a multiple of 16"),
    refused("task", POOLING, "generate"),
    refused("runner", POOLING, "auto", "generate"),
    refused("convert", POOLING, "auto", "none"),
    refused("override_pooler_config", POOLING, "{}", "null"),
    no_effect("use_warmup", "nothing is compiled or tuned at the first request"),
    no_effect("limit_mm_per_prompt", NO_IMAGES),
    no_effect("mm_processor_kwargs", NO_IMAGES),
    no_effect("max_encoder_cache", NO_IMAGES),
    no_effect("max_processor_cache", NO_IMAGES),
    no_effect("enable_mm", NO_IMAGES, SWITCH),
    differs("reasoning_parser", "`ernie-x1` is `ernie45`, `ernie-45-vl` is `qwen3`; without it, the template's"),
    same("chat_template"),
    differs("tool_call_parser", "`ernie-x1` and `ernie-45-vl-thinking` are `ernie45`; without it, the template's"),
    refused("tool_parser_plugin", "no code is loaded; `--tool-call-parser` has the formats", ""),
    differs("speculative_config", "`ngram` and `suffix` are our speculation, which is on without it", _speculation),
    refused("benchmark_metrics_config", "`fastdeploy bench serve` measures, and `/metrics` counts"),
    no_effect("dynamic_load_weight", "every server takes new weights", SWITCH),
    refused(
        "load_strategy", "weights come by folder, upload or shared memory: `/v1/update_weights`",
        "", "normal", "meta", "ipc_snapshot",
    ),
    refused("rsync_config", "weights come by folder, upload or shared memory: `/v1/update_weights`", "{}", "null"),
    no_effect("engine_worker_queue_port", SOCKETS),
    differs("quantization", "`wint8` is `int8`: weights in 8 bit, beside those in bfloat16. No 4 bit, no FP8"),
    no_effect("graph_optimization_config", "there are no graphs to capture"),
    refused("plas_attention_config", "attention is over all tokens", "{}", "null"),
    refused(
        "guided_decoding_backend", "structured output is always on, by llguidance",
        "off", "auto", "xgrammar", "guidance",
    ),
    refused(
        "guided_decoding_disable_any_whitespace", "a request says it: `structured_outputs.disable_any_whitespace`",
        "false", "0", "",
    ),
    no_effect("enable_logprob", "log probabilities are always there", SWITCH),
    refused("enable_keep_sampling_mask", "a request asks for it: `return_sampling_mask`", "false", form=SWITCH),
    no_effect("max_logprobs", "up to 1024 for each token; `--max-reply-logprobs` bounds a request"),
    differs("logprobs_mode", "`raw_logprobs` is `raw`, `processed_logprobs` is `processed`. No logits"),
    no_effect("seed", "a request without a seed gets one by chance; its field `seed` fixes it"),
    refused("enable_early_stop", "no early stop; set `stop` or a penalty in the request", "false", form=SWITCH),
    refused("early_stop_config", "no early stop; set `stop` or a penalty in the request", "{}", "null"),
    no_effect("lm_head_fp32", "sums and logits are always in float32", SWITCH),
    no_effect("moe_gate_fp32", ONE_WAY, SWITCH),
    refused(
        "logits_processors",
        "no code is loaded. Taken: `LogitBiasLogitsProcessor`, `ThinkingBudgetLogitsProcessor`, which are always there",
        *PROCESSORS, form=MANY,
    ),
    refused("enable_entropy", "no entropy; ask for log probabilities", "false", form=SWITCH),
    refused("model_impl", "the models are our own", "auto", "fastdeploy"),
    no_effect("deploy_modality", NO_IMAGES),
    # Many devices
    refused("tensor_parallel_size", ONE_ENGINE, "1", short=("-tp",)),
    refused("data_parallel_size", ONE_ENGINE, "1"),
    refused("local_data_parallel_id", ONE_ENGINE, "0"),
    refused("ips", ONE_ENGINE, "", "127.0.0.1", "0.0.0.0", "localhost"),
    no_effect("disable_custom_all_reduce", "an engine is one process", SWITCH),
    no_effect("enable_flashinfer_allreduce_fusion", "an engine is one process", SWITCH),
    no_effect("shutdown_comm_group_if_worker_idle", "an engine is one process", TOGGLE),
    no_effect("use_internode_ll_two_stage", ONE_WAY, SWITCH),
    no_effect("disable_sequence_parallel_moe", ONE_WAY, SWITCH),
    no_effect("enable_expert_parallel", ONE_WAY, SWITCH),
    no_effect("enable_eplb", ONE_WAY, SWITCH),
    no_effect("eplb_config", ONE_WAY),
    differs(
        "routing_replay_config",
        "`routing_store_type` `response` is `--enable-return-routed-experts`; no store of files, and none by RDMA",
        _routing,
    ),
    no_effect("enable_chunked_moe", ONE_WAY, SWITCH),
    no_effect("chunked_moe_size", ONE_WAY),
    no_effect("ep_prefill_use_worst_num_tokens", ONE_WAY, SWITCH),
    no_effect("enable_moe_scores_elementwise_fuse", ONE_WAY, SWITCH),
    # Memory and steps
    differs("max_num_seqs", "32, and not 8, without it"),
    same("num_gpu_blocks_override"),
    differs("max_num_batched_tokens", "2048, and not 8192, without it"),
    differs("gpu_memory_utilization", "share of the machine's memory; without it, the KV cache is 2 GiB at most"),
    refused("load_choices", "weights are read as they are; `benchmarks/make_model.py` makes random ones",
            "default", "default_v1"),
    no_effect("model_loader_extra_config", "weights are read in one way"),
    no_effect("kv_cache_ratio", KV_SPLIT),
    no_effect("static_decode_blocks", KV_SPLIT),
    no_effect("prealloc_dec_block_slot_num_threshold", KV_SPLIT),
    no_effect("swap_space", "the KV cache is in the CPU's memory already; `--kv-cache-gb` makes it larger"),
    no_effect("cache_queue_port", SOCKETS),
    refused("kvcache_storage_backend", "the KV cache is in memory only", ""),
    no_effect("write_policy", "the KV cache is in memory only"),
    same("enable_prefix_caching"),
    no_effect("enable_output_caching", "the KV of outputs is kept with that of prompts", TOGGLE),
    no_effect("enable_chunked_prefill", PREFILL, SWITCH),
    no_effect("max_num_partial_prefills", PREFILL),
    no_effect("max_long_partial_prefills", PREFILL),
    no_effect("long_prefill_token_threshold", PREFILL),
    no_effect("disable_chunked_mm_input", NO_IMAGES, SWITCH),
    no_effect("enable_overlap_schedule", "a matter of speed alone; a plan takes little of a step here", TOGGLE),
    no_effect("use_cudagraph", "there are no graphs to capture", SWITCH),
    # Prefill and decode apart, router
    refused("splitwise_role", NO_SPLIT, "mixed"),
    refused("innode_prefill_ports", NO_SPLIT, ""),
    no_effect("cache_transfer_protocol", "prefill and decode are done by the same engine"),
    no_effect("pd_comm_port", SOCKETS),
    no_effect("rdma_comm_ports", SOCKETS),
    refused("router", "a server does not register itself; `fastdeploy fleet` is a router, others get a list", ""),
    # Scheduler
    refused("scheduler_name", "requests wait in the engine; `fastdeploy fleet` shares them out", "local"),
    differs("scheduler_max_size", "`--max-waiting`: choices that may wait, then 429. 0 and -1 leave it", _waiting),
    no_effect("scheduler_ttl", "a request waits as long as its client does"),
    *(
        no_effect(f"scheduler_{name}", NO_REDIS)
        for name in (
            "host", "port", "db", "password", "topic", "min_load_score", "load_shards_num", "sync_period",
            "expire_period", "release_load_expire_period", "reader_parallel", "writer_parallel", "reader_batch_size",
            "writer_batch_size",
        )
    ),
)  # fmt: skip
