"""Gauges of the engine: their names, their help texts, and the values that a scrape reads. And the watch for logits
that are not finite."""

from __future__ import annotations

import logging
import time
from collections import Counter

from fastdeploy.core.plan import StepPlan
from fastdeploy.engine.parts import EngineParts
from fastdeploy.engine.pauses.scopes import ScopeRegistry
from fastdeploy.engine.sleep import TAGS
from fastdeploy.metrics.metrics import EngineMetrics

log = logging.getLogger("fastdeploy.engine")

MAX_SERIES = 64  # names come and go by the thousand, but a time series stays in the database


def add_gauges(parts: EngineParts, short_lives: int) -> None:
    """Add all gauges. short_lives: see EngineConfig."""
    _add_request_gauges(parts)
    _add_adapter_gauges(parts)
    _add_control_gauges(parts, short_lives)


def _add_request_gauges(parts: EngineParts) -> None:
    add, scheduler, kv, retention = parts.metrics.add_gauge, parts.scheduler, parts.scheduler.kv, parts.retention
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


def _add_control_gauges(parts: EngineParts, short_lives: int) -> None:
    add, runner, pause, weights = parts.metrics.add_gauge, parts.runner, parts.scopes.whole_pause, parts.weights
    add("rejecting_new_requests", "1 while a pause hold stands", lambda: pause.rejecting_new_requests)
    add("is_paused", "1 while quiesced", lambda: pause.is_paused)
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
    text = "1 while memory of this tag is released"
    parts.metrics.add_flags("asleep", text, "tag", TAGS, lambda tag: tag in runner.asleep)


class NonFiniteWatch:
    """A count of the rows of logits that are not finite. If the first step that samples with new weights has such a
    row, the training has probably diverged, and the log gets a warning."""

    def __init__(self, metrics: EngineMetrics):
        self._metrics = metrics
        self._seen_epoch = -1

    def observe(self, plan: StepPlan, num_sequences: int, num_non_finite: int) -> None:
        """Look at one step. num_sequences: those that got tokens. num_non_finite: those that ended because their logits
        were not finite."""
        if num_non_finite:
            self._metrics.non_finite_rows.inc(num_non_finite)
        served = plan.chunks[0].served
        if served.weight_epoch == self._seen_epoch or not num_sequences + num_non_finite:
            return
        self._seen_epoch = served.weight_epoch
        if num_non_finite:
            self._metrics.non_finite_commits.inc()
            log.warning(
                "the first step of weights %r (weight_epoch %d) gave logits that are not finite for %d of %d sequences",
                served.version,
                served.weight_epoch,
                num_non_finite,
                num_sequences + num_non_finite,
            )
