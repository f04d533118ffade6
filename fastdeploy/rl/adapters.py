"""Loading adapters on many replicas, and counting the loads for the staleness of their tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from fastdeploy.core.errors import ModelNotFound
from fastdeploy.rl.adapter_upload import Upload
from fastdeploy.rl.errors import Report
from fastdeploy.rl.fan_out import fan_out, require_all, run_shielded
from fastdeploy.rl.holds import Holds
from fastdeploy.rl.publish import CONFIRM_S, Publication
from fastdeploy.rl.replica import Replica
from fastdeploy.rl.routing import Router
from fastdeploy.rl.staleness import PublicationLedger


class _Loads:
    """The loads of one adapter name, until its unload. lock: one load at a time."""

    def __init__(self, ledger: PublicationLedger) -> None:
        self.lock = asyncio.Lock()
        self.ledger = ledger


class Adapters:
    """The adapters that this client has loaded. Different names load at the same time.

    Each replica replaces its adapter by itself, between two of its steps. There is no common commit as for base
    weights: a replica whose load failed gets no requests of the adapter until a load succeeds there."""

    def __init__(self, replicas: list[Replica], router: Router, holds: Holds):
        self._replicas = replicas
        self._router = router
        self._holds = holds
        self._loads: dict[str, _Loads] = {}
        self._unloaded = PublicationLedger()  # of all names that were unloaded, as if they were one

    def ledger(self, lora_name: str) -> PublicationLedger:
        """Return the loads of an adapter by this client, as publications. Empty for an unknown name."""
        loads = self._loads.get(lora_name)
        return PublicationLedger() if loads is None else loads.ledger

    async def load(self, lora_name: str, upload: Upload, deadline_s: float) -> Publication:
        """Load an adapter on all replicas. upload: the call of /v1/adapters/load. Raises FleetError with a report per
        replica if a load failed, and HoldLost, before any load, if a hold of this client on the engine or on this
        adapter had ended."""
        loads = self._loads.setdefault(lora_name, _Loads(self._unloaded.continued()))
        async with loads.lock:
            await self._holds.require_standing(CONFIRM_S, lora_name)
            number = loads.ledger.begin_publication()

            async def load(replica: Replica) -> dict[str, Any]:
                done = await replica.call("POST", "/v1/adapters/load", deadline_s, **upload.arguments)
                loads.ledger.record_commit(number, replica.url, done["boot_id"], done["adapter_epoch"])
                self._router.note_adapter(replica, lora_name, done["boot_id"])
                return done

            async def load_all() -> list[Report]:
                reports = await fan_out(self._replicas, load, deadline_s)
                loads.ledger.end_publication()
                self._exclude_failed(lora_name, reports)
                return reports

            reports = await run_shielded(load_all())
        require_all("the adapter was not loaded everywhere", reports)
        return Publication(number, str(reports[0].unwrap()["version"]), reports, upload.tensors, upload.nbytes)

    def _exclude_failed(self, lora_name: str, reports: list[Report]) -> None:
        """Leave out the replicas whose load failed, unless all failed: then all have the adapter that they had."""
        if any(report.ok for report in reports):
            for replica, report in zip(self._replicas, reports, strict=True):
                if not report.ok:
                    self._router.exclude_adapter(replica, lora_name)

    def forget_all(self) -> None:
        """Forget all loads: a reset unloads all adapters."""
        for lora_name, loads in self._loads.items():
            self._router.forget_adapter(lora_name)
            self._unloaded.add_past(loads.ledger)
        self._loads.clear()

    async def unload(self, lora_name: str, deadline_s: float) -> list[Report]:
        """Remove a name from all replicas. A replica that does not know the name counts as done. Raises ModelNotFound
        if no replica knows the name, and FleetError if a replica does not answer."""
        self._router.forget_adapter(lora_name)
        newest = self._unloaded.newest = max(self._unloaded.newest, self.ledger(lora_name).newest)
        self._loads.pop(lora_name, None)
        unknown: list[ModelNotFound] = []

        async def unload(replica: Replica) -> dict[str, Any]:
            try:
                done = await replica.call("POST", "/v1/adapters/unload", deadline_s, json={"lora_name": lora_name})
            except ModelNotFound as error:
                unknown.append(error)
                return {"lora_name": lora_name}
            self._unloaded.record_commit(newest, replica.url, replica.boot_id, done["adapter_epoch"])
            return done

        reports = await fan_out(self._replicas, unload, deadline_s)
        if len(unknown) == len(self._replicas):
            raise unknown[0]
        return require_all("the adapter was not unloaded everywhere", reports)
