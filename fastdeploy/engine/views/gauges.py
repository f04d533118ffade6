"""The figures of the engine that each scrape reads from the parts (GET /metrics). docs/metrics.md describes them."""

from __future__ import annotations

import time
from collections import Counter

from fastdeploy.core.config import QUANTIZATIONS, EngineConfig
from fastdeploy.engine.parts import EngineParts
from fastdeploy.engine.pauses.scopes import ScopeRegistry
from fastdeploy.engine.sleep import TAGS
from fastdeploy.scheduler.queue import Gate

MAX_SERIES = 64  # names come and go by the thousand, but a time series stays in the database


def add_gauges(parts: EngineParts, config: EngineConfig) -> None:
    """Add all gauges, and the counters whose values the parts keep."""
    _add_request_gauges(parts)
    _add_batch_gauges(parts)
    _add_kv_gauges(parts, config)
    _add_adapter_gauges(parts)
    _add_control_gauges(parts, config.short_lives)


def _add_request_gauges(parts: EngineParts) -> None:
    add, scheduler, retention = parts.metrics.add_gauge, parts.scheduler, parts.retention
    add("num_requests_running", "Sequences in the batch", lambda: len(scheduler.running) + len(scheduler.frozen))
    add("num_requests_waiting", "Sequences that wait to enter the batch", lambda: len(scheduler.waiting))
    text = "Age of the oldest request that waits for its first step"
    add("oldest_waiting_seconds", text, lambda: _oldest_waiting_s(parts))
    add("num_preemptions", "Preemptions of sequences since start", lambda: scheduler.num_preemptions)
    speculation, count = scheduler.speculation, parts.metrics.add_counter
    count("spec_decode_num_draft_tokens", "Drafts that were verified", lambda: speculation.num_drafted)
    count("spec_decode_num_accepted_tokens", "Drafts that became tokens", lambda: speculation.num_accepted)
    text = "Share of the verified drafts that became tokens"
    add("spec_decode_draft_acceptance_rate", text, lambda: _share((speculation.num_accepted, speculation.num_drafted)))
    add("recomputed_tokens", "Tokens computed again after their KV was lost", lambda: scheduler.num_recomputed)
    add("num_requests_frozen", "Sequences whose adapter is paused while they run", lambda: len(scheduler.frozen))
    add("retained_bytes", "Memory of results kept for retain_s, about", lambda: retention.nbytes)
    add("retained_results_dropped", "Results dropped before their retain_s was over", lambda: retention.num_dropped)


def _oldest_waiting_s(parts: EngineParts) -> float:
    """Return the age of the oldest request that waits and was never in the batch, in seconds; 0.0 without one."""
    waiting = [r.arrival for r in parts.lifecycle.requests if r.live and not r.admitted_at]
    return max(time.time() - min(waiting), 0.0) if waiting else 0.0


def _add_batch_gauges(parts: EngineParts) -> None:
    add, count, scheduler = parts.metrics.add_gauge, parts.metrics.add_counter, parts.scheduler
    add("batch_size", "Sequences of the batch that steps compute", lambda: _batch_size(parts))
    add("max_batch_size", "Sequences that the batch may have", lambda: scheduler.max_num_seqs)
    free = lambda: scheduler.max_num_seqs - len(scheduler.running)  # noqa: E731
    add("available_batch_size", "Sequences that may still join the batch", free)
    steps = scheduler.pacer.decode_steps
    text = "Time of the steps that computed one token of each sequence, without prompts and drafts"
    count("decode_step_seconds", text, lambda: steps.seconds)
    count("decode_step_least_seconds", "The least time of these steps on this machine", lambda: steps.least_s)


def _batch_size(parts: EngineParts) -> int:
    return 0 if parts.scheduler.gate is Gate.CLOSED else len(parts.scheduler.running)


def _add_kv_gauges(parts: EngineParts, config: EngineConfig) -> None:
    add, count, kv, info = parts.metrics.add_gauge, parts.metrics.add_counter, parts.scheduler.kv, parts.runner.info
    total = info.num_blocks
    constants = {"block_size": info.block_size, "num_gpu_blocks": total, "cache_dtype": info.dtype}
    constants["enable_prefix_caching"] = config.enable_prefix_caching
    parts.metrics.add_info("cache_config_info", "1, with the settings of the KV cache", constants)
    add("available_gpu_block_num", "KV blocks that no request holds", lambda: kv.num_free)
    text = "KV blocks that no request holds and that are in no cached prefix"
    add("free_gpu_block_num", text, lambda: kv.num_unused)
    add("max_gpu_block_num", "KV blocks in all", lambda: total)
    add("available_gpu_resource", "Share of the KV blocks that no request holds", lambda: kv.num_free / total)
    add("gpu_cache_usage_perc", "Share of the KV blocks that requests hold", lambda: 1 - kv.num_free / total)
    add("hit_token_rate", "prefix_cache_token_num / prefix_cache_queried_tokens", lambda: _share(kv.token_hits))
    add("gpu_hit_token_rate", "As hit_token_rate: there is one cache", lambda: _share(kv.token_hits))
    add("hit_req_rate", "Share of the admissions that found a cached prefix", lambda: _share(kv.request_hits))
    count("prefix_cache_token_num", "Tokens found in the prefix cache", lambda: kv.hit_tokens)
    count("prefix_gpu_cache_token_num", "As prefix_cache_token_num: there is one cache", lambda: kv.hit_tokens)
    count("prefix_cache_queried_tokens", "Tokens looked up in the prefix cache", lambda: kv.queried_tokens)


def _share(part_of: tuple[int, int]) -> float:
    part, of = part_of
    return part / of if of else 0.0


def _add_adapter_gauges(parts: EngineParts) -> None:
    add, adapters, memory = parts.metrics.add_gauge, parts.adapters, parts.scheduler.adapters
    add("adapters_known", "Adapters that requests can name", lambda: adapters.num_known)
    add("adapters_in_memory", "Adapters that are packed in memory", lambda: len(memory))
    add("adapter_bytes", "Memory of packed adapters, with those that are being read", lambda: memory.nbytes)
    add("adapter_evictions", "Adapters that left the memory for others, since start", lambda: memory.num_evictions)
    add("adapter_reads", "Reads of adapters that had left the memory, since start", lambda: memory.num_reads)
    text = "Loads of adapters that were refused or failed, since start"
    add("adapter_loads_failed", text, lambda: adapters.num_failed)
    text = f"Sequences of an adapter, for the {MAX_SERIES} adapters with most of them"
    parts.metrics.add_series("adapter_requests", text, "lora_name", lambda: _most_requested(parts.scopes))


def _most_requested(scopes: ScopeRegistry) -> dict[str, int]:
    """Return the number of choices by the name of their adapter, for the MAX_SERIES names with most choices."""
    numbers: Counter[str] = Counter()
    for model in scopes.adapters:
        if model.requests:
            numbers[model.served.adapter_name] += len(model.requests)
    return dict(numbers.most_common(MAX_SERIES))


def _oldest_hold_s(scopes: ScopeRegistry) -> float:
    return max((hold["age_s"] for hold in scopes.describe_holds()), default=0.0)


def _add_control_gauges(parts: EngineParts, short_lives: int) -> None:
    add, runner, pause, weights = parts.metrics.add_gauge, parts.runner, parts.scopes.whole_pause, parts.weights
    add("rejecting_new_requests", "1 while a pause hold stands", lambda: pause.rejecting_new_requests)
    add("is_paused", "1 while quiesced", lambda: pause.is_paused)
    add("holds", "Holds that stand, of the whole engine and of adapters", lambda: len(parts.scopes.describe_holds()))
    add("oldest_hold_seconds", "Age of the oldest hold that stands", lambda: _oldest_hold_s(parts.scopes))
    base, text = parts.scopes.base, "Number of the weights that serve; every commit raises it"
    add("weight_epoch", text, lambda: base.served.weight_epoch)
    add("weight_updates_failed", "Weight sessions without a commit, since start", lambda: weights.num_failed)
    add("weight_session_open", "1 while a weight session is open", lambda: weights.session is not None)
    add("weight_commit_seconds", "Duration of the last commit, between two steps", lambda: weights.last_commit_s)
    started = time.time()
    add("start_time_seconds", "Start of this engine, in seconds since 1970", lambda: started)
    text = "Ends of the engine in a row, without a minute of service between them"
    add("engine_short_lives", text, lambda: short_lives)
    text = "Memory of the standby copy, packed weights that do not serve"
    add("standby_weight_bytes", text, lambda: runner.standby_nbytes)
    text, used = "1 for the quantization of the weights that serve", base.served.quantization
    parts.metrics.add_flags("quantization", text, "quantization", QUANTIZATIONS, lambda name: name == used)
    text = "1 while memory of this tag is released"
    parts.metrics.add_flags("asleep", text, "tag", TAGS, lambda tag: tag in runner.asleep)
