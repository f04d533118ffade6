"""The variables of the environment of PaddlePaddle/FastDeploy (release 2.6 and develop), and what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.foreign import Foreign, Form, Verdict, no_effect, refused

API_KEY, LOG_LEVEL, OUR_LOG_LEVEL = "FD_API_KEY", "FD_LOG_LEVEL", "FASTDEPLOY_LOG_LEVEL"
GPU = "of GPUs, and of other accelerators"
MIXTURE = "of models with experts"
SPLIT = "of prefill and decode apart"
LOG = "the log is on stderr, one line for each event; `FASTDEPLOY_LOG_LEVEL` sets how much"
TRACING = "`--trace FILE` writes a trace; nothing is sent anywhere"
USAGE = "nothing about the use of this server is collected or sent"
QUEUES = "of FastDeploy's queues between processes"
DOWNLOAD = "nothing is downloaded"
RESERVE = "the engine reserves nothing for outputs: it stops a request for a moment and computes it again"
BITS = "the same bits alone and in any batch, always"
ADAPTER = "of FastDeploy's internal adapter"

_NO_EFFECT: Mapping[str, str] = {
    LOG: "FD_LOG_DIR FD_LOG_REQUESTS FD_LOG_REQUESTS_LEVEL FD_LOG_MAX_LEN FD_LOG_BACKUP_COUNT"
    " FD_CONSOLE_SCHEDULER_METRICS FD_CONSOLE_DECODE_LOG_INTERVAL FD_LLGUIDANCE_LOG_LEVEL",
    TRACING: "FD_TRACE TRACES_ENABLE FD_SERVICE_NAME FD_HOST_NAME TRACES_EXPORTER EXPORTER_OTLP_ENDPOINT"
    " EXPORTER_OTLP_HEADERS FD_JOB_ID FD_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS FD_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE",
    USAGE: "DO_NOT_TRACK FD_USAGE_STATS_SERVER FD_USAGE_SOURCE FD_CONFIG_ROOT",
    DOWNLOAD: "FD_MODEL_SOURCE FD_MODEL_CACHE",
    GPU: "FD_BUILDING_ARCS CUDA_VISIBLE_DEVICES FD_CACHE_PARAMS FD_ATTENTION_BACKEND USE_DECODE_UNIFIED_ATTENTION"
    " FD_SAMPLING_CLASS FD_NVFP4_LOAD_BLOCKSCALE_LEAVE FD_NVFP4_GEMM_BACKEND FD_USE_MACHETE FD_USE_BLACKWELL_GEMM"
    " FD_TRITON_KERNEL_CACHE_DIR FD_TP_GROUP_GID_OFFSET FD_CUSTOM_AR_MAX_SIZE_MB FD_ENABLE_PDL FD_HPU_CHUNK_SIZE"
    " FD_HPU_MEASUREMENT_MODE FD_XPU_MOE_FFN_QUANT_TYPE_MAP FD_XPU_ENABLE_MIXED_EP_MODE FD_USE_PHI_FP8_QUANT"
    " FD_USE_PHI_RMSNORM FD_SiluAndMul_USE_PHI_SWIGLU FD_FP8_QUANT_WITH_POW2SCALE FD_ENABLE_TOP_P_ONE_OPT"
    " FD_ENABLE_MODEL_CACHE FD_USE_DEEP_GEMM FD_METAX_KVCACHE_MEM FD_USE_PRECOMPILED",
    MIXTURE: "FD_MOE_BACKEND FD_MOE_MXFP4_BACKEND FD_USE_PFCC_DEEP_EP FD_EP_BATCHED_TOKEN_TIMEOUT"
    " FD_EP_MAX_PREFETCH_TASK_NUM FD_MOE_PROB_IN_ADVANCE FD_USE_PHI_MOE_TOPK FD_USE_PHI_MOE_PERMUTE",
    SPLIT: "FD_PD_CHANGEABLE FD_USE_AGGREGATE_SEND PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES FD_PD_REORDER"
    " FD_ENABLE_PD_RDMA_EAGER_CONNECT FD_PREFILL_PREPARE_REQ_THREAD_NUM FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS"
    " FD_ENABLE_CACHE_TASK FD_OFFLINE_PERF_TEST_FOR_PD",
    QUEUES: "FD_ZMQ_SNDHWM FD_ENGINE_TASK_QUEUE_WITH_SHM FD_USE_GET_SAVE_OUTPUT_V1 ZMQ_SEND_BATCH_DATA FMQ_CONFIG_JSON"
    " FD_ENABLE_E2W_TENSOR_CONVERT FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT FD_ENABLE_ASYNC_LLM",
    ADAPTER: "FD_ZMQ_RECV_REQUEST_SERVER_PORT FD_ZMQ_SEND_RESPONSE_SERVER_PORT FD_ZMQ_RECV_REQUEST_SERVER_PORTS"
    " FD_ZMQ_SEND_RESPONSE_SERVER_PORTS FD_ZMQ_CONTROL_CMD_SERVER_PORTS FD_ENABLE_RETURN_TEXT",
    RESERVE: "FD_ENC_DEC_BLOCK_NUM FD_INIT_NEW_TOKEN_RATIO FD_MIN_NEW_TOKEN_RATIO FD_NEW_TOKEN_RATIO_DECAY"
    " FD_CLIP_MAX_NEW_TOKENS FD_USE_NEW_TOKEN_RATIO_RESERVE"
    " FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL"
    " FD_RESERVE_DECAY_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL"
    " FD_RESERVE_MIN_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL FD_DISABLED_RECOVER",
    BITS: "FD_DETERMINISTIC_MODE FD_DETERMINISTIC_SPLIT_KV_SIZE FD_DETERMINISTIC_LOG_MODE FD_ENABLE_RL",
    "prompts are always read in pieces": "FD_DISABLE_CHUNKED_PREFILL FD_ENABLE_MAX_PREFILL",
    "there is one scheduler": "ENABLE_V1_KVCACHE_SCHEDULER",
    "there is one way to update weights": "FD_ENABLE_V1_UPDATE_WEIGHTS",
    "the KV cache is in memory, and one thread uses it": "FD_USE_KVCACHE_LOCK FD_AS_ONLY_FLUSH"
    " FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST FILE_BACKEND_STORAGE_DIR FD_CACHE_PROC_EXIT_TIMEOUT"
    " FD_CACHE_PROC_ERROR_COUNT FD_ENABLE_SWAP_SPACE_CLEARING",
    "`--dtype` chooses": "FD_CPU_USE_BF16",
    "the number and length of stop sequences have other limits": "FD_MAX_STOP_SEQS_NUM FD_STOP_SEQS_MAX_LEN",
    "the tokenizer is that of transformers": "FD_USE_HF_TOKENIZER",
    "`--max-connections` is the limit": "FD_SUPPORT_MAX_CONNECTIONS",
    "config.json tells the layout of a checkpoint": "FD_FOR_TORCH_MODEL_FORMAT",
    "quantized weights are made at each load": "FD_ENABLE_MODEL_LOAD_CACHE",
    "the end of reasoning is the template's": "FD_LIMIT_THINKING_CONTENT_TRUNCATE_STR",
    "requests hold text only": "ENCODE_FEATURE_BOS_AK ENCODE_FEATURE_BOS_SK ENCODE_FEATURE_ENDPOINT",
    "of FastDeploy's library for grammars": "FD_FILL_BITMASK_BATCH FD_GUIDANCE_DISABLE_ADDITIONAL",
    "a request whose client has gone is always ended": "FD_ENABLE_REQUEST_DISCONNECT_STOP_INFERENCE",
    "`--stall-s` is the limit": "FD_WORKER_ALIVE_TIMEOUT",
}
VARIABLES: tuple[Foreign, ...] = (
    Foreign(API_KEY, Verdict.SAME, "keys with commas between them, weaker than `--api-key`"),
    Foreign(LOG_LEVEL, Verdict.DIFFERS, f"`{OUR_LOG_LEVEL}`, which is stronger: debug, info, warning or error"),
    Foreign("FD_DEBUG", Verdict.DIFFERS, f"`1` is `{OUR_LOG_LEVEL}=debug`"),
    refused("FD_PLUGINS", "no code is loaded", ""),
    refused("FD_ENABLE_INTERNAL_ADAPTER", "requests come over HTTP", "0", ""),
    refused("FD_ENABLE_MULTI_API_SERVER", "`fastdeploy fleet --replicas N` starts many engines", "0", ""),
    refused("FD_PD_TRANSFER_VIA_STORAGE", "prefill and decode are done by the same engine", "0", ""),
    *(no_effect(name, text, Form.TEXT) for text, names in _NO_EFFECT.items() for name in names.split()),
)


def take_variables(environment: MutableMapping[str, str]) -> list[str]:
    """Take what FastDeploy's variables say, and return those that are set and have no effect. Raises InvalidField for
    one that is refused."""
    present = [row for row in VARIABLES if row.name in environment]
    for row in present:
        if row.verdict is Verdict.REFUSED and not row.is_harmless(environment[row.name]):
            raise InvalidField(row.name, f"PaddlePaddle/FastDeploy's variable is refused here: {row.text}")
    level = environment.get(LOG_LEVEL) or ("debug" if environment.get("FD_DEBUG", "0") not in ("", "0") else None)
    if level is not None and OUR_LOG_LEVEL not in environment:
        environment[OUR_LOG_LEVEL] = level.lower()
    ours = ("CUDA_VISIBLE_DEVICES", "DO_NOT_TRACK")  # of everybody, so that nobody is told about them
    return [row.name for row in present if row.verdict is Verdict.NO_EFFECT and row.name not in ours]
