"""Watch for new weights that give logits that are not finite."""

from __future__ import annotations

import logging

from fastdeploy.core.plan import StepPlan
from fastdeploy.metrics.metrics import EngineMetrics

log = logging.getLogger("fastdeploy.engine")


class FiniteWatch:
    """Counts rows that are not finite. Logs a warning if the first step that samples with new weights has such a row:
    the training has probably diverged."""

    def __init__(self, metrics: EngineMetrics):
        self._metrics = metrics
        self._seen_epoch = -1

    def step_done(self, plan: StepPlan, num_tokens: int, num_non_finite: int) -> None:
        """num_tokens: tokens sampled in this step. num_non_finite: sequences that ended because their logits were
        not finite."""
        if num_non_finite:
            self._metrics.non_finite_rows.inc(num_non_finite)
        served = plan.chunks[0].served
        if served.weight_epoch == self._seen_epoch or not num_tokens + num_non_finite:
            return
        self._seen_epoch = served.weight_epoch
        if num_non_finite:
            self._metrics.non_finite_commits.inc()
            log.warning(
                "the first step of weights %r (weight_epoch %d) gave logits that are not finite for %d of %d sequences",
                served.version,
                served.weight_epoch,
                num_non_finite,
                num_tokens + num_non_finite,
            )
