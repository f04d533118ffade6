"""The engine's Prometheus metrics, and the watch for logits that are not finite."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fastdeploy.core.config import PAUSE_MODES
from fastdeploy.core.plan import StepPlan
from fastdeploy.core.request import FinishReason, NewTokens, Request

log = logging.getLogger("fastdeploy.engine")
_SECONDS = np.array([0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0])


class Durations:
    """A histogram that takes in all values of a step at once. The library's histogram takes a lock for each value."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry):
        self._name, self._text = name, text
        self._counts = np.zeros(len(_SECONDS) + 1, np.int64)  # by bucket, the last one without an upper bound
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: list[float]) -> None:
        """Add values. A value below zero (the clock was set back) counts as zero."""
        if seconds:
            values = np.maximum(seconds, 0.0)
            self._counts += np.bincount(np.searchsorted(_SECONDS, values), minlength=len(self._counts))
            self._sum += float(values.sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        buckets = list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class _Series(Collector):
    """Figures whose labels change from scrape to scrape. See ``EngineMetrics.add_series``."""

    def __init__(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]):
        self._name, self._text, self._label, self._read = name, text, label, read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=[self._label])
        for value, figure in self._read().items():
            family.add_metric([value], figure)
        yield family


class _Count(Collector):
    """A counter whose value is kept elsewhere. See ``EngineMetrics.add_counter``."""

    def __init__(self, name: str, text: str, read: Callable[[], float]):
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._text, self._read())


class EngineMetrics:
    """The metrics of one engine, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def make(kind: Callable[..., Any], name: str, text: str, **more: Any) -> Any:
            return kind(f"fastdeploy:{name}", text, registry=self.registry, **more)

        self.prompt_tokens = make(Counter, "prompt_tokens_total", "Prompt tokens of accepted requests")
        self.tokens = make(Counter, "generation_tokens_total", "Tokens sampled")
        self.num_tokens = 0  # the value of that counter
        ended = make(Counter, "request_finished_total", "Sequences that ended, by reason", labelnames=("reason",))
        self._by_reason = {reason: ended.labels(reason.value) for reason in FinishReason}
        tokens = make(
            Counter, "ended_tokens_total", "Output tokens of ended sequences, by reason", labelnames=("reason",)
        )
        self._tokens_by_reason = {reason: tokens.labels(reason.value) for reason in FinishReason}
        # All labels exist from the start: Prometheus does not see the first step of a counter that appears with it.
        self.pauses = make(Counter, "pauses_total", "Pauses of the whole engine, by mode", labelnames=("mode",))
        for mode in PAUSE_MODES:
            self.pauses.labels(mode)
        self.commits = make(Counter, "commits_total", "Commits, by scope and kv", labelnames=("scope", "kv"))
        for labels in itertools.product(("engine", "adapter"), ("keep", "recompute")):
            self.commits.labels(*labels)
        self.non_finite_rows = make(Counter, "non_finite_rows_total", "Sequences that ended by non-finite logits")
        self.non_finite_commits = make(Counter, "non_finite_commits_total", "Weights whose first logits are not finite")
        self.internal_errors = make(Counter, "internal_errors_total", "Messages that failed by an error of the engine")
        self.steps_abandoned = make(Counter, "steps_abandoned_total", "Steps given up for a pause, to be done again")
        self.trace_dropped = make(Counter, "trace_events_dropped_total", "Events missing in the trace: a slow disk")
        self.ttft = make(Durations, "time_to_first_token_seconds", "Arrival to first token")
        self.tpot = make(Durations, "time_per_output_token_seconds", "Gap between tokens")
        self.pause_seconds = make(Durations, "pause_seconds", "First hold to last release, of the whole engine")
        self.e2e = make(Durations, "e2e_request_latency_seconds", "Arrival to last token")

    def observe_tokens(self, step: list[NewTokens]) -> None:
        count = sum([len(new.token_ids) for new in step])
        self.num_tokens += count
        self.tokens.inc(count)
        gaps = [(new.gap_s, len(new.token_ids)) for new in step if not new.first]
        self.tpot.observe([gap_s / n for gap_s, n in gaps for _ in range(n)])
        self.ttft.observe([new.gap_s for new in step if new.first])

    def observe_ended(self, requests: list[Request], now: float) -> None:
        for reason, count in collections.Counter(request.finish_reason for request in requests).items():
            assert reason is not None, "a request that has not ended"
            self._by_reason[reason].inc(count)
        for request in requests:
            assert request.finish_reason is not None, "a request that has not ended"
            self._tokens_by_reason[request.finish_reason].inc(request.num_output_tokens)
        self.e2e.observe([now - request.arrival for request in requests])

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a figure that each scrape gets from ``read``."""
        Gauge(f"fastdeploy:{name}", text, registry=self.registry).set_function(read)

    def add_counter(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a count since the start, whose name ends with ``_total`` in a scrape, which gets it from ``read``."""
        self.registry.register(_Count(f"fastdeploy:{name}", text, read))

    def add_flags(self, name: str, text: str, label: str, values: Iterable[str], read: Callable[[str], bool]) -> None:
        """Add a figure of 0 or 1 for each of ``values``, which are the values of ``label``."""
        gauge = Gauge(f"fastdeploy:{name}", text, registry=self.registry, labelnames=(label,))
        for value in values:
            gauge.labels(value).set_function(functools.partial(read, value))

    def add_series(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Add a figure for each key of what ``read`` returns at a scrape. The keys are values of ``label``."""
        self.registry.register(_Series(f"fastdeploy:{name}", text, label, read))

    def render(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()


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
