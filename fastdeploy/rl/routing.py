"""Choosing the replica of a request: the replica of its session, else the one with the fewest choices in flight."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager

from fastdeploy.core.errors import FastDeployError
from fastdeploy.rl.errors import is_busy, is_retryable
from fastdeploy.rl.replica import Replica

MAX_SESSIONS = 100_000


class Router:
    """Chooses a replica per request, and avoids those that failed, reject requests or serve other weights. A session
    moves to another replica only if its own replica failed or is stale, not if that replica is busy for a moment.

    An adapter that this client has loaded is served only by engines that have answered its last load."""

    def __init__(self, replicas: Sequence[Replica]):
        self.replicas = list(replicas)
        self._sessions: OrderedDict[Hashable, Replica] = OrderedDict()
        self._changed = asyncio.Event()
        self._anything_published = False
        # By adapter that this client has loaded: the replicas that serve its last load, and the boot id of each.
        self._adapters: dict[str, dict[Replica, str | None]] = {}

    @asynccontextmanager
    async def reserve(
        self, session: Hashable | None, choices: int, lora_name: str | None = None
    ) -> AsyncIterator[Replica]:
        """Choose a healthy replica that serves the adapter (None: the base model), and add ``choices`` to its load
        inside the block. Waits while there is none."""
        while True:
            replica = self._pick(session, lora_name)
            if replica is None:
                await self._wait(lora_name)
                continue
            replica.in_flight += choices
            try:
                if not replica.needs_probe or (await self._probe(replica) and self._serves(replica, lora_name)):
                    yield replica
                    return
            finally:
                replica.in_flight -= choices

    def _pick(self, session: Hashable | None, lora_name: str | None) -> Replica | None:
        now = _now()
        usable = [r for r in self.replicas if self._serves(r, lora_name) and r.retry_at <= now]
        home = self._sessions.get(session) if session is not None else None
        if home in usable:
            self._sessions.move_to_end(session)
            return home
        best = min(usable, key=lambda r: r.in_flight, default=None)
        moves = home is None or home.failures > 0 or not self._serves(home, lora_name)
        if best is not None and session is not None and moves:
            self._sessions[session] = best
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return best

    async def _wait(self, lora_name: str | None) -> None:
        """Wait until a replica may be tried again, or until :meth:`retry_now`."""
        self._changed.clear()
        due = min((r.retry_at for r in self.replicas if self._serves(r, lora_name)), default=None)
        try:
            async with asyncio.timeout_at(due):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _probe(self, replica: Replica) -> bool:
        """Return whether a replica that failed or was never used takes requests, and note its boot id. Concurrent
        callers share one probe. Raises the replica's error if no later probe can succeed: the key is wrong, or the
        address is that of another service."""
        async with replica.probe_lock:
            if not replica.needs_probe:
                return replica.stale is None
            if replica.retry_at > _now():
                return False
            try:
                self.note_engine(replica, (await replica.call("GET", "/health")).get("boot_id"))
                replica.mark_healthy()
                await replica.call("GET", "/ready")
            except FastDeployError as error:
                if not is_retryable(error):
                    raise
                self.note_refusal(replica, error)
                return False
            return replica.stale is None

    def note_refusal(self, replica: Replica, error: FastDeployError) -> None:
        """Avoid ``replica`` for a while: ``error`` says that it failed, or takes no requests at the moment."""
        wait = error.detail.get("retry_after", 0.0)
        if is_busy(error):
            replica.mark_busy(_now(), wait)
        else:
            replica.mark_failed(_now(), wait)

    def note_engine(self, replica: Replica, boot_id: str | None) -> bool:
        """Note the boot id of the engine of ``replica``. Return False if the engine restarted without the published
        weights."""
        restarted = boot_id is not None and replica.boot_id is not None and boot_id != replica.boot_id
        if restarted and self._anything_published:
            replica.stale = "its engine restarted without the published weights"
        replica.boot_id = boot_id or replica.boot_id
        return replica.stale is None

    def note_published(self, replica: Replica, boot_id: str | None) -> None:
        """Note that ``replica`` serves the last publication."""
        self._anything_published = True
        replica.boot_id, replica.stale = boot_id or replica.boot_id, None
        replica.mark_healthy()
        self._changed.set()

    def exclude(self, replica: Replica, why: str) -> None:
        """Send ``replica`` no requests until it is published to, since it does not serve the weights of the others."""
        replica.stale = why

    def note_adapter(self, replica: Replica, lora_name: str, boot_id: str | None) -> None:
        """Note that the engine ``boot_id`` of ``replica`` serves the last load of the adapter."""
        self.note_engine(replica, boot_id)
        self._adapters.setdefault(lora_name, {})[replica] = boot_id
        self._changed.set()

    def exclude_adapter(self, replica: Replica, lora_name: str) -> None:
        """Send ``replica`` no requests of the adapter until it is loaded there."""
        self._adapters.setdefault(lora_name, {}).pop(replica, None)

    def forget_adapter(self, lora_name: str) -> None:
        """Note that the adapter was unloaded. Its requests go to any replica, which refuses them."""
        self._adapters.pop(lora_name, None)
        self._changed.set()

    def adapter_loads(self, lora_name: str | None) -> object | None:
        """Return an object that stands for the loads of the name by this client since its last unload, or None."""
        return self._adapters.get(lora_name or "")

    def _serves(self, replica: Replica, lora_name: str | None) -> bool:
        """Return whether ``replica`` has the last publication, and the last load of the adapter."""
        if replica.stale is not None:
            return False
        loaded = None if lora_name is None else self._adapters.get(lora_name)
        return loaded is None or (replica in loaded and loaded[replica] == replica.boot_id)

    def lost_adapter(self, replica: Replica, lora_name: str | None) -> bool:
        """Return whether this client has loaded the adapter on ``replica``, whose engine has restarted since."""
        return replica in self._adapters.get(lora_name or "", {}) and not self._serves(replica, lora_name)

    def retry_now(self) -> None:
        """Try replicas that rejected requests again at once."""
        for replica in self.replicas:
            if not replica.failures:
                replica.retry_at = 0.0
        self._changed.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
