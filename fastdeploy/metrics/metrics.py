"""The engine's Prometheus metrics, and the watch for logits that are not finite."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from fastdeploy.core.config import PAUSE_MODES
from fastdeploy.core.errors import QueueFull, RequestsRejected
from fastdeploy.core.plan import StepPlan
from fastdeploy.core.request import FinishReason, NewTokens, Request
from fastdeploy.metrics.figures import COUNTS, LAGS, RATES, Count, Distribution, Info, Series

log = logging.getLogger("fastdeploy.engine")
# Codes of refusals by the load or by a pause, which exist as a label before the first one.
REJECTIONS = (QueueFull.code, RequestsRejected.code)


class EngineMetrics:
    """The metrics of one engine, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def make(kind: Callable[..., Any], name: str, text: str, **more: Any) -> Any:
            return kind(f"fastdeploy:{name}", text, registry=self.registry, **more)

        self.requests = make(Counter, "requests_number", "Requests that were accepted")
        self.succeeded = make(Counter, "request_success_total", "Sequences that ended by a stop or by their length")
        self.rejected = make(Counter, "requests_rejected_total", "Requests that were refused", labelnames=("code",))
        for code in REJECTIONS:
            self.rejected.labels(code)
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
        self.ttft = make(Distribution, "time_to_first_token_seconds", "Arrival to first token")
        self.tpot = make(Distribution, "time_per_output_token_seconds", "Gap between tokens")
        self.pause_seconds = make(Distribution, "pause_seconds", "First hold to last release, of the whole engine")
        self.e2e = make(Distribution, "e2e_request_latency_seconds", "Arrival to last token")
        self.queue = make(Distribution, "request_queue_time_seconds", "Arrival to the first step")
        self.inference = make(Distribution, "request_inference_time_seconds", "First step to last token")
        self.prefill = make(Distribution, "request_prefill_time_seconds", "First step to first token")
        self.decode = make(Distribution, "request_decode_time_seconds", "First token to last token")
        text = "Prompt tokens of accepted requests"
        self.prompt_sizes = make(Distribution, "request_prompt_tokens", text, bounds=COUNTS)
        text = "max_tokens of accepted requests, or the room that the context leaves"
        self.max_tokens = make(Distribution, "request_params_max_tokens", text, bounds=COUNTS)
        text = "Output tokens of sequences that ended with some"
        self.output_sizes = make(Distribution, "request_generation_tokens", text, bounds=COUNTS)
        text = "Output tokens per second from arrival to the end, of sequences that ended with some"
        self.token_rates = make(Distribution, "request_token_ratio", text, bounds=RATES)
        text = "Commits between the weights of the oldest token and those that serve, of sequences that ended well"
        self.version_lag = make(Distribution, "request_version_lag", text, bounds=LAGS)

    def observe_accepted(self, requests: list[Request]) -> None:
        """Count one group of choices that was accepted."""
        num_prompt_tokens = requests[0].num_prompt_tokens
        self.requests.inc()
        self.prompt_tokens.inc(num_prompt_tokens)
        self.prompt_sizes.observe([num_prompt_tokens])
        self.max_tokens.observe([requests[0].max_output_tokens])

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
        if requests:
            self.e2e.observe([now - request.arrival for request in requests])
            self._observe_phases([request for request in requests if request.num_output_tokens], now)

    def _observe_phases(self, requests: list[Request], now: float) -> None:
        """Take in ended requests that have tokens. One that resumes an earlier attempt counts its own tokens only."""
        self.queue.observe([r.admitted_at - r.arrival for r in requests])
        self.prefill.observe([r.first_token_at - r.admitted_at for r in requests])
        self.inference.observe([r.last_token_at - r.admitted_at for r in requests])
        self.decode.observe([r.last_token_at - r.first_token_at for r in requests])
        self.output_sizes.observe([float(r.num_output_tokens) for r in requests])
        self.token_rates.observe([r.num_output_tokens / max(now - r.arrival, 1e-9) for r in requests])
        well = [r for r in requests if r.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)]
        self.succeeded.inc(len(well))
        self.version_lag.observe([float(r.version_lag) for r in well])

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a figure that each scrape gets from ``read``."""
        Gauge(f"fastdeploy:{name}", text, registry=self.registry).set_function(read)

    def add_counter(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a count since the start, whose name ends with ``_total`` in a scrape, which gets it from ``read``."""
        self.registry.register(Count(f"fastdeploy:{name}", text, read))

    def add_info(self, name: str, text: str, constants: Mapping[str, object]) -> None:
        """Add a figure of 1, whose labels are ``constants``."""
        self.registry.register(Info(f"fastdeploy:{name}", text, {key: str(value) for key, value in constants.items()}))

    def add_flags(self, name: str, text: str, label: str, values: Iterable[str], read: Callable[[str], bool]) -> None:
        """Add a figure of 0 or 1 for each of ``values``, which are the values of ``label``."""
        gauge = Gauge(f"fastdeploy:{name}", text, registry=self.registry, labelnames=(label,))
        for value in values:
            gauge.labels(value).set_function(functools.partial(read, value))

    def add_series(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Add a figure for each key of what ``read`` returns at a scrape. The keys are values of ``label``."""
        self.registry.register(Series(f"fastdeploy:{name}", text, label, read))

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
