"""Gauges of the engine: their names, their help texts, and the values that a scrape reads."""

from __future__ import annotations

import time

from fastdeploy.cache_manager.adapter_memory import AdapterMemory
from fastdeploy.cache_manager.kv_cache_manager import KVCacheManager
from fastdeploy.core.runner import Runner
from fastdeploy.engine.adapters.registry import AdapterRegistry
from fastdeploy.engine.pauses.pause import PauseState
from fastdeploy.engine.requests.retention import Retention
from fastdeploy.engine.sleep import TAGS
from fastdeploy.engine.updates.weights import WeightSessions
from fastdeploy.metrics.metrics import EngineMetrics
from fastdeploy.scheduler.scheduler import Scheduler

MAX_SERIES = 64  # names come and go by the thousand, but a time series stays in the database


def add_request_gauges(metrics: EngineMetrics, scheduler: Scheduler, kv: KVCacheManager, retention: Retention) -> None:
    add = metrics.add_gauge
    add("num_requests_running", "Sequences in the batch", lambda: len(scheduler.running) + len(scheduler.frozen))
    add("num_requests_waiting", "Sequences that wait to enter the batch", lambda: len(scheduler.waiting))
    add("available_gpu_block_num", "KV blocks that no request holds", lambda: kv.num_free)
    add("total_gpu_block_num", "KV blocks in all", lambda: scheduler.info.num_blocks)
    add("prefix_cache_hit_tokens", "Tokens served from the prefix cache since start", lambda: kv.hit_tokens)
    add("prefix_cache_queried_tokens", "Tokens looked up in the prefix cache", lambda: kv.queried_tokens)
    add("num_preemptions", "Preemptions of sequences since start", lambda: scheduler.num_preemptions)
    add("recomputed_tokens", "Tokens computed again after their KV was lost", lambda: scheduler.num_recomputed)
    add("num_requests_frozen", "Sequences whose adapter is paused while they run", lambda: len(scheduler.frozen))
    add("retained_bytes", "Memory of results kept for retain_s, about", lambda: retention.nbytes)
    add("retained_results_dropped", "Results dropped before their retain_s was over", lambda: retention.num_dropped)


def add_adapter_gauges(metrics: EngineMetrics, adapters: AdapterRegistry, memory: AdapterMemory) -> None:
    add = metrics.add_gauge
    add("adapters_known", "Adapters that requests can name", lambda: adapters.num_known)
    add("adapters_in_memory", "Adapters that are packed in memory", lambda: len(memory))
    add("adapter_bytes", "Memory of packed adapters, with those that are being read", lambda: memory.nbytes)
    add("adapter_evictions", "Adapters that left the memory for others, since start", lambda: memory.num_evictions)
    add("adapter_reads", "Reads of adapters that had left the memory, since start", lambda: memory.num_reads)
    add(
        "adapter_loads_failed",
        "Loads of adapters that were refused or failed, since start",
        lambda: adapters.num_failed,
    )
    text = f"Sequences of an adapter, for the {MAX_SERIES} adapters with most of them"
    metrics.add_series("adapter_requests", text, "lora_name", lambda: adapters.num_requests(MAX_SERIES))


def add_control_gauges(
    metrics: EngineMetrics, pause: PauseState, weights: WeightSessions, runner: Runner, short_lives: int
) -> None:
    add = metrics.add_gauge
    add("rejecting_new_requests", "1 while a pause hold stands", lambda: pause.rejecting_new_requests)
    add("is_paused", "1 while quiesced", lambda: pause.is_paused)
    add(
        "weight_epoch",
        "Number of the weights that serve; every commit raises it",
        lambda: pause.scope.model.served.weight_epoch,
    )
    add("weight_updates_failed", "Weight sessions without a commit, since start", lambda: weights.num_failed)
    add("weight_session_open", "1 while a weight session is open", lambda: weights.session is not None)
    add("weight_commit_seconds", "Duration of the last commit, between two steps", lambda: weights.last_commit_s)
    started = time.time()
    add("start_time_seconds", "Start of this engine, in seconds since 1970", lambda: started)
    text = "Ends of the engine in a row, without a minute of service between them"
    add("engine_short_lives", text, lambda: short_lives)
    text = "Memory of the standby copy, packed weights that do not serve"
    add("standby_weight_bytes", text, lambda: runner.standby_nbytes)
    metrics.add_flags("asleep", "1 while memory of this tag is released", "tag", TAGS, lambda tag: tag in runner.asleep)
