"""The state of one engine, from which a gateway builds the state of its fleet anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastdeploy.core.runner import Runner
from fastdeploy.core.served_weights import CommittedState
from fastdeploy.engine.adapters.registry import AdapterRegistry
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.leadership import Leadership
from fastdeploy.engine.pauses.scopes import Scopes
from fastdeploy.engine.updates.weights import WeightSessions
from fastdeploy.inter_communicator.messages import FleetStateArgs
from fastdeploy.scheduler.scheduler import Scheduler


class FleetReport:
    """Reads the reply to FleetStateArgs, on the loop's thread. committed: returns what the last commit has set."""

    def __init__(
        self,
        leadership: Leadership,
        scheduler: Scheduler,
        scopes: Scopes,
        weights: WeightSessions,
        adapters: AdapterRegistry,
        runner: Runner,
        committed: Callable[[], CommittedState],
    ):
        self._leadership, self._scheduler, self._scopes = leadership, scheduler, scopes
        self._weights, self._adapters, self._runner, self._committed = weights, adapters, runner, committed

    @handles(FleetStateArgs)
    def read(self, args: FleetStateArgs) -> dict[str, Any]:
        """Return the reply, see messages.FleetStateArgs."""
        scheduler, pause = self._scheduler, self._scopes.whole_pause
        return {
            **self._leadership.describe(),
            "last_change": list(self._leadership.last_change),
            **self._scopes.whole.weights_label(),
            **self._committed()._asdict(),
            "phase": pause.phase.value,
            "is_paused": pause.is_paused,
            "rejecting_new_requests": pause.rejecting_new_requests,
            "holds": self._scopes.describe_holds(),
            **self._adapters.describe(),
            "past_adapter_epoch": self._adapters.past_epoch,
            "prepared_loads": self._adapters.prepared(),
            "asleep": sorted(self._runner.asleep),
            "session": self._weights.describe_session(),
            "running": len(scheduler.running) + len(scheduler.frozen),
            "waiting": len(scheduler.waiting),
            "available_gpu_block_num": scheduler.kv.num_free,
            "max_num_seqs": scheduler.max_num_seqs,
        }
