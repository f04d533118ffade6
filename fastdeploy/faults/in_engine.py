"""The faults that only the engine's process can have. Imported there with ``--faults`` only."""

from __future__ import annotations

from typing import Any

from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.faults.signals import SignalReader, shift_clock
from fastdeploy.scheduler.scheduler import Scheduler


class KeptKv:
    """KV that survives commits. Cached prefixes are found by the namespace of the weights that computed them. With the
    fault, new weights take over the namespace of those before them."""

    def __init__(self, signals: SignalReader):
        self._signals = signals
        self._namespaces: dict[int, int] = {}  # weight_epoch -> that of the weights whose KV it finds

    def namespace(self, served: ServedWeights) -> tuple[int, int]:
        """Return what ServedWeights.kv_namespace is with the fault."""
        epoch = served.weight_epoch
        return self._namespaces.get(epoch, epoch), served.adapter

    def keeps(self, model: Any, before: ServedWeights) -> bool:
        """Note a commit, and return whether KV shall survive it. model: whose ``served`` are the new weights."""
        if not self._signals.read().keep_kv:
            return False
        self._namespaces[model.served.weight_epoch] = self.namespace(before)[0]
        return True


def install(folder: str) -> None:
    """Give this process the faults that its API server signals in ``folder``. The classes are changed, so this is for
    the process of an engine alone."""
    signals = SignalReader(folder)
    kept = KeptKv(signals)
    changed = Scheduler.weights_changed

    def weights_changed(self: Scheduler, model: Any, before: ServedWeights, recompute: bool) -> None:
        if not kept.keeps(model, before):
            changed(self, model, before, recompute)

    ServedWeights.kv_namespace = property(kept.namespace)  # type: ignore[assignment, method-assign]
    Scheduler.weights_changed = weights_changed  # type: ignore[method-assign]
    shift_clock(lambda: signals.read().clock_s)
