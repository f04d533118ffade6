"""Plans of adapters, and of sleep and wake-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from fastdeploy.core.errors import FastDeployError, InvalidField, WeightUpdateRefused
from fastdeploy.fleet.plan import Context, Plan, bounded
from fastdeploy.fleet.reports import merge
from fastdeploy.fleet.state import FleetAdapter
from fastdeploy.fleet.transaction import Rule, Step
from fastdeploy.inter_communicator import messages as m


class LoadPlan(Plan[m.LoadAdapterArgs]):
    """Load and check an adapter on all, and swap it in on all afterwards, with one number. Each replica reads the
    source for itself, so a source that is changed meanwhile may give two adapters: such a load is refused."""

    rule = Rule.COMMIT

    def __init__(self, args: m.LoadAdapterArgs, context: Context):
        super().__init__(args, context)
        if args.prepare:
            raise InvalidField("prepare", "expected a whole load: the fleet makes both phases itself")
        self._entry: FleetAdapter | None = None
        self._fingerprint: str | None = None
        self._prepared: dict[str, str] = {}  # by replica, the fingerprint of what it has prepared

    def prepare(self, name: str) -> list[m.Args]:
        return [replace(self.args, prepare=True, source=self.sources.get(name, self.args.source))]

    def commit(self, name: str) -> m.Args | None:
        if self._entry is None:
            before = self.state.adapters.get(self.args.lora_name)
            assert self._fingerprint is not None, "a commit follows the preparation of all"
            epoch = self.state.next_adapter_epoch(self.args.lora_name)
            self._entry = FleetAdapter(self.args, epoch, self._fingerprint, before)
            self.state.adapters[self.args.lora_name] = self._entry
        return m.EndLoadArgs(self.args.lora_name, True, self._entry.epoch, self._prepared[name])

    def heard(self, name: str, args: m.Args, result: dict[str, Any]) -> None:
        if isinstance(args, m.LoadAdapterArgs):
            self._prepared[name] = result["fingerprint"]

    def judge(self, name: str, step: Step, result: dict[str, Any]) -> FastDeployError | None:
        """All replicas must have read the same adapter."""
        if step is not Step.PREPARE:
            return None
        self._fingerprint = self._fingerprint or result["fingerprint"]
        if result["fingerprint"] == self._fingerprint:
            return None
        why = f"{name} has read another adapter than the other replicas: the source was changed during the load"
        return WeightUpdateRefused(f"lora_name: {why}", param="lora_name")

    def rollback(self, name: str) -> m.Args | None:
        """A replica that refused to prepare has no prepared load, or that of another call. After an unload, the load of
        a later call may be prepared."""
        if name not in self._prepared:
            return None
        return m.EndLoadArgs(self.args.lora_name, False, fingerprint=self._prepared[name])

    def seconds(self, step: Step) -> float:
        if step is not Step.PREPARE:
            return self.config.fence_after_s
        return bounded(self.args.timeout_s, self.config.stage_timeout_s) + self.config.fence_after_s

    def done(self) -> dict[str, Any]:
        if self._entry is not None:
            self._entry.before = None
        return super().done()

    def failed(self) -> None:
        """Take the adapter back, but not its number: a replica that was fenced may have served with it. A later load
        may have replaced it already, and must not bring it back."""
        if (entry := self._entry) is None:
            return
        entry.failed = True
        self.state.note_past_adapter(entry.epoch)
        if self.state.adapters.get(self.args.lora_name) is not entry:
            return
        before = entry.before
        while before is not None and before.failed:
            before = before.before
        del self.state.adapters[self.args.lora_name]
        if before is not None:
            self.state.adapters[self.args.lora_name] = before


class UnloadPlan(Plan[m.UnloadAdapterArgs]):
    """Remove an adapter name."""

    rule = Rule.AGREE

    def begin(self) -> None:
        self.state.unload(self.args.lora_name)


S = TypeVar("S", bound=m.SleepArgs | m.WakeArgs)


class _MovePlan(Plan[S]):
    """A change of what sleeps. The gateway makes one at a time."""

    rule = Rule.UNDO

    def begin(self) -> None:
        self._before = self.state.asleep

    def rollback(self, name: str) -> m.Args | None:
        return None if name in self.errors else self._opposite(self.results[name]["asleep"])

    def _opposite(self, asleep: Sequence[str]) -> m.Args:
        """Return the call that takes the move back on a replica where ``asleep`` sleeps now."""
        raise AssertionError("each move has an opposite")

    def done(self) -> dict[str, Any]:
        report = merge(list(self.results.values()))
        self.state.asleep = tuple(report["asleep"])
        return report


class SleepPlan(_MovePlan[m.SleepArgs]):
    """Send all to sleep, or wake up those that sleep already."""

    def _opposite(self, asleep: Sequence[str]) -> m.Args:
        return m.WakeArgs(tuple(tag for tag in asleep if tag not in self._before))

    def seconds(self, step: Step) -> float:
        if step is Step.ROLLBACK:
            return self.config.stage_timeout_s + self.config.fence_after_s
        return bounded(self.args.timeout_s, 0.0) + self.config.fence_after_s


class DiscardPlan(SleepPlan):
    """Send all to sleep without their weights. Discarded weights do not come back, so a replica that refuses is fenced,
    and joins asleep."""

    rule = Rule.AGREE


class WakePlan(_MovePlan[m.WakeArgs]):
    """Wake all up, or send those that woke up to sleep again."""

    def _opposite(self, asleep: Sequence[str]) -> m.Args:
        return m.SleepArgs(tuple(tag for tag in self._before if tag not in asleep))

    def seconds(self, step: Step) -> float:
        return self.config.stage_timeout_s + self.config.fence_after_s
