"""What a client knows about its server: whether it takes requests, and whether it has what the client sent to it."""

from __future__ import annotations

import asyncio
import random

from fastdeploy.core.errors import FastDeployError
from fastdeploy.rl.connection import Connection
from fastdeploy.rl.errors import is_busy, is_retryable

BACKOFF_S, MAX_BACKOFF_S = 0.1, 10.0


class LoadedAdapter:
    """The loads of one name by this client since the last unload. boot_id: of the engine that has answered the last
    one."""

    boot_id: str | None = None


class ServerState:
    """What decides when requests may be sent.

    boot_id: of the engine, as last seen. stale: why no request is sent before the next publication (the engine has
    restarted without the published weights), or None. adapters: what this client has loaded, by name."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self.boot_id: str | None = None
        self.stale: str | None = None
        self.adapters: dict[str, LoadedAdapter] = {}
        self._anything_published = False
        self._failures = 0
        self._retry_at = 0.0  # earliest time of the next request, on the event loop's clock
        self._needs_probe = True  # ask /health and /ready before the next request
        self._probe_lock = asyncio.Lock()
        self._changed = asyncio.Event()

    async def until_usable(self, lora_name: str | None) -> None:
        """Wait until the server may be asked, and has the adapter (None: the base model). Raises the server's error if
        waiting is in vain: the key is wrong, or the address is that of another service."""
        while True:
            if not self._serves(lora_name) or self._retry_at > _now():
                await self._wait(lora_name)
            elif not self._needs_probe or (await self._probe() and self._serves(lora_name)):
                return

    async def _wait(self, lora_name: str | None) -> None:
        """Wait until the server may be tried again, or until something has changed."""
        self._changed.clear()
        try:
            async with asyncio.timeout_at(self._retry_at if self._serves(lora_name) else None):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _probe(self) -> bool:
        """Return whether a server that failed or was never used takes requests. Concurrent callers share one probe."""
        async with self._probe_lock:
            if not self._needs_probe:
                return self.stale is None
            if self._retry_at > _now():
                return False
            try:
                await self.ask_engine()
                self._mark_healthy()
                await self._connection.call("GET", "/ready")
            except FastDeployError as error:
                if not is_retryable(error):
                    raise
                self.note_refusal(error)
                return False
            return self.stale is None

    async def ask_engine(self, timeout_s: float = 30.0) -> bool:
        """Ask the server for the boot id of its engine. Return :meth:`note_engine`."""
        return self.note_engine((await self._connection.call("GET", "/health", timeout_s)).get("boot_id"))

    def _mark_healthy(self) -> None:
        self._failures, self._retry_at, self._needs_probe = 0, 0.0, False

    def note_refusal(self, error: FastDeployError) -> None:
        """Send no request for a while: ``error`` says that the server failed (then longer after each failure, and not
        before a probe), or takes no requests at the moment."""
        wait, backoff = error.detail.get("retry_after", 0.0), BACKOFF_S
        if not is_busy(error):
            backoff = min(BACKOFF_S * 2 ** min(self._failures, 30), MAX_BACKOFF_S) * random.uniform(0.5, 1.0)
            self._failures += 1
            self._needs_probe = True
        self._retry_at = _now() + max(wait, backoff)

    def note_engine(self, boot_id: str | None) -> bool:
        """Record the boot id of the engine. Return False if the engine lacks the published weights."""
        restarted = boot_id is not None and self.boot_id is not None and boot_id != self.boot_id
        if restarted and self._anything_published:
            self.stale = "its engine restarted without the published weights"
        self.boot_id = boot_id or self.boot_id
        return self.stale is None

    def note_published(self, boot_id: str | None) -> None:
        """Record that the engine serves the last publication."""
        self._anything_published = True
        self.boot_id, self.stale = boot_id or self.boot_id, None
        self._mark_healthy()
        self._changed.set()

    def note_adapter(self, lora_name: str, boot_id: str | None) -> None:
        """Record that the engine serves the last load of the adapter."""
        self.note_engine(boot_id)
        self.adapters.setdefault(lora_name, LoadedAdapter()).boot_id = boot_id
        self._changed.set()

    def forget_adapter(self, lora_name: str) -> None:
        """Record that the adapter was unloaded. The server refuses its requests."""
        self.adapters.pop(lora_name, None)
        self._changed.set()

    def has_lost(self, lora_name: str | None) -> bool:
        """Return whether the engine has restarted since this client loaded the adapter."""
        return lora_name in self.adapters and not self._serves(lora_name)

    def _serves(self, lora_name: str | None) -> bool:
        """Return whether the engine has the last publication, and the last load of the adapter."""
        loaded = self.adapters.get(lora_name or "")
        return self.stale is None and (loaded is None or loaded.boot_id == self.boot_id)

    def retry_now(self) -> None:
        """Send requests again at once, if the server did not take any for a while."""
        if not self._failures:
            self._retry_at = 0.0
        self._changed.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
