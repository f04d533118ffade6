"""The engine's Prometheus metrics, under FastDeploy's names. Counters move with events; gauges are read when asked."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from fastdeploy.engine.request import FinishReason, Request
from fastdeploy.scheduler.scheduler import NewToken

_SECONDS = np.array([0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0])


class Gauges(NamedTuple):
    """What is in the engine at the moment of a scrape."""

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    prefix_hit_tokens: int
    prefix_queried_tokens: int
    preemptions: int
    rejecting: bool
    paused: bool
    epoch: int
    updates_failed: int
    session_open: bool
    last_commit_s: float
    asleep: Collection[str]
    retained_bytes: int
    retained_dropped: int


class Durations:
    """A histogram that takes in all of a step at once: the library's own locks and searches for every value."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry):
        self._name, self._text = name, text
        self._counts = np.zeros(len(_SECONDS) + 1, np.int64)  # by bucket, the last one without an upper bound
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: list[float]) -> None:
        """Below zero (the clock was set back) counts as zero."""
        if seconds:
            values = np.maximum(seconds, 0.0)
            self._counts += np.bincount(np.searchsorted(_SECONDS, values), minlength=len(self._counts))
            self._sum += float(values.sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        buckets = list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class EngineMetrics:
    """One registry per engine: nothing global, so that engines in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def make(kind, name, text, **more):
            return kind(f"fastdeploy:{name}", text, registry=self.registry, **more)

        self.running = make(Gauge, "num_requests_running", "Sequences in the batch")
        self.waiting = make(Gauge, "num_requests_waiting", "Sequences that wait for a place in the batch")
        self.free_blocks = make(Gauge, "available_gpu_block_num", "KV blocks that no request holds")
        self.total_blocks = make(Gauge, "total_gpu_block_num", "KV blocks in all")
        self.hit_tokens = make(Gauge, "prefix_cache_hit_tokens", "Tokens served from the prefix cache since start")
        self.queried_tokens = make(Gauge, "prefix_cache_queried_tokens", "Tokens looked up in the prefix cache")
        self.preemptions = make(Gauge, "num_preemptions", "Sequences whose KV was given up for others, since start")
        self.rejecting = make(Gauge, "rejecting_new_requests", "1 while a pause hold stands")
        self.paused = make(Gauge, "is_paused", "1 while quiesced")
        self.epoch = make(Gauge, "weight_epoch", "Commits of weights since start")
        self.updates_failed = make(Gauge, "weight_updates_failed", "Weight sessions without a commit, since start")
        self.session_open = make(Gauge, "weight_session_open", "1 while a weight session is open")
        self.last_commit = make(Gauge, "weight_commit_seconds", "What the last commit took, between two steps")
        self.asleep = make(Gauge, "asleep", "1 while its memory is given back", labelnames=("tag",))
        self.retained_bytes = make(Gauge, "retained_bytes", "Memory of results kept for retain_s, about")
        self.retained_dropped = make(
            Gauge, "retained_results_dropped", "Results dropped before their retain_s was over"
        )
        self.prompt_tokens = make(Counter, "prompt_tokens_total", "Prompt tokens of accepted requests")
        self.tokens = make(Counter, "generation_tokens_total", "Tokens sampled")
        self.finished = make(
            Counter, "request_finished_total", "Sequences that ended, by reason", labelnames=("reason",)
        )
        self.non_finite_rows = make(
            Counter, "non_finite_rows_total", "Sequences that ended with an error since their logits were not finite"
        )
        self.non_finite_commits = make(
            Counter, "non_finite_commits_total", "Weights whose first step gave logits that were not finite"
        )
        self.internal_errors = make(Counter, "internal_errors_total", "Messages that failed by an error of the engine")
        self.steps_abandoned = make(Counter, "steps_abandoned_total", "Steps given up for a pause, to be done again")
        self.ttft = make(Durations, "time_to_first_token_seconds", "Arrival to first token")
        self.tpot = make(Durations, "time_per_output_token_seconds", "Gap between tokens")
        self.e2e = make(Durations, "e2e_request_latency_seconds", "Arrival to last token")
        self._by_reason = {reason: self.finished.labels(reason.value) for reason in FinishReason}

    def observe_tokens(self, tokens: list[NewToken]) -> None:
        self.tokens.inc(len(tokens))
        self.tpot.observe([token.gap_s for token in tokens if not token.first])
        self.ttft.observe([token.gap_s for token in tokens if token.first])

    def observe_ended(self, requests: list[Request], now: float) -> None:
        for reason, count in collections.Counter(request.finish_reason for request in requests).items():
            self._by_reason[reason].inc(count)
        self.e2e.observe([now - request.arrival for request in requests])

    def render(self, gauges: Gauges) -> str:
        """The text exposition of everything, with the gauges as given."""
        self.running.set(gauges.running)
        self.waiting.set(gauges.waiting)
        self.free_blocks.set(gauges.free_blocks)
        self.total_blocks.set(gauges.total_blocks)
        self.hit_tokens.set(gauges.prefix_hit_tokens)
        self.queried_tokens.set(gauges.prefix_queried_tokens)
        self.preemptions.set(gauges.preemptions)
        self.rejecting.set(gauges.rejecting)
        self.paused.set(gauges.paused)
        self.epoch.set(gauges.epoch)
        self.updates_failed.set(gauges.updates_failed)
        self.session_open.set(gauges.session_open)
        self.last_commit.set(gauges.last_commit_s)
        self.retained_bytes.set(gauges.retained_bytes)
        self.retained_dropped.set(gauges.retained_dropped)
        for tag in ("weight", "kv_cache"):
            self.asleep.labels(tag).set(tag in gauges.asleep)
        return generate_latest(self.registry).decode()
