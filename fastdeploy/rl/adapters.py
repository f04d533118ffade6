"""Loading adapters, and counting the loads for the staleness of their tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from fastdeploy.rl.connection import Connection, run_shielded
from fastdeploy.rl.holds import Holds
from fastdeploy.rl.publish import CONFIRM_S, Publication
from fastdeploy.rl.server_state import ServerState
from fastdeploy.rl.staleness import PublicationLedger
from fastdeploy.rl.uploads import PartCall

MAX_NAMES = 10_000  # whose loads are counted


class _Loads:
    """The loads of one name, also of before an unload. lock: one load at a time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.ledger = PublicationLedger()


class Adapters:
    """The adapters that this client has loaded. Different names load at the same time."""

    def __init__(self, connection: Connection, state: ServerState, holds: Holds):
        self._connection = connection
        self._state = state
        self._holds = holds
        self._loads: dict[str, _Loads] = {}

    def ledger(self, lora_name: str) -> PublicationLedger:
        """Return the loads of an adapter by this client, as publications. Empty for an unknown name."""
        loads = self._loads.get(lora_name)
        return PublicationLedger() if loads is None else loads.ledger

    def _loads_of(self, lora_name: str) -> _Loads:
        if lora_name not in self._loads and len(self._loads) >= MAX_NAMES:
            unloaded = (name for name in self._loads if name not in self._state.adapters)
            self._loads.pop(next(unloaded, ""), None)
        return self._loads.setdefault(lora_name, _Loads())

    async def load(self, lora_name: str, call: PartCall, deadline_s: float) -> Publication:
        """Load an adapter. call: of /v1/adapters/load. Raises HoldLost, before the load, if a hold of this client on
        the engine or on this adapter had ended."""
        loads = self._loads_of(lora_name)
        async with loads.lock:
            await self._holds.require_standing(CONFIRM_S, lora_name)
            return await run_shielded(self._load(lora_name, loads.ledger, call, deadline_s))

    async def _load(self, lora_name: str, ledger: PublicationLedger, call: PartCall, deadline_s: float) -> Publication:
        number = ledger.begin_publication()
        try:
            report = await self._connection.call("POST", "/v1/adapters/load", deadline_s, **call.arguments())
        except BaseException:
            ledger.end_publication()
            raise
        ledger.end_publication(report["boot_id"], report["adapter_epoch"])
        self._state.note_adapter(lora_name, report["boot_id"])
        return Publication(number, str(report["version"]), report, call.tensors, call.nbytes)

    async def unload(self, lora_name: str, timeout_s: float) -> dict[str, Any]:
        """Remove a name. Raises ModelNotFound if the server does not know the name."""
        self._state.forget_adapter(lora_name)
        return await self._connection.call("POST", "/v1/adapters/unload", timeout_s, json={"lora_name": lora_name})

    def forget_all(self) -> None:
        """Record that a reset unloads all adapters."""
        for lora_name in list(self._state.adapters):
            self._state.forget_adapter(lora_name)
