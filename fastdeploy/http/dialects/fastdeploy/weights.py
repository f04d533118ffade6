"""FastDeploy's way to new weights: clear them, have the trainer write the folder of the model, and load them again.

Between the two calls the named hold ``CLEARED`` stands, so every API server and every gateway knows the state.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import FastDeployError, WrongOrder
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m

CLEARED = "fastdeploy-cleared"
REPUBLISH = "republish"  # the engine's own hold while it has no weights
TAGS = frozenset({"weight", "kv_cache"})
PLACED_BY = "fastdeploy"
PAUSE_TIMEOUT_S = 60.0


class FolderWeights:
    """The weights in ``folder``, which this server was started with. A load that fails leaves the engine cleared, and
    may be called again.

    A trainer may send each call from all of its ranks at once. One API server serves them one after the other; beside
    calls of other API servers, one may fail, but the hold and the sleep end together."""

    def __init__(self, client: ServingClient, folder: str):
        self._client, self._folder = client, folder
        self._lock = asyncio.Lock()

    async def are_cleared(self) -> bool:
        """Return whether requests cannot be served until the weights are loaded again."""
        return CLEARED in await self._holds()

    async def clear(self, tags: tuple[str, ...] = ()) -> dict[str, Any] | None:
        """End all requests with the tokens that they have, refuse new ones, and give the memory of ``tags`` back; () =
        all. The weights are not kept. Return the report; None if they were cleared already. Raises WrongOrder, and ends
        no request, while a weight session is open."""
        async with self._lock:
            info = await self._client.call(m.WeightInfoArgs())
            asleep = set(info["asleep"])
            wanted = tuple(tag for tag in tags if tag not in asleep)
            if _is_done(tags, asleep) and await self.are_cleared():
                return None
            if info["session"] is not None:  # the sleep would be refused, but only after the requests have ended
                raise WrongOrder("a weight session is open: commit or abort it first")
            pause = m.PauseArgs("abort", True, "reject", PAUSE_TIMEOUT_S, hold_id=CLEARED, placed_by=PLACED_BY)
            await self._client.call(pause)
            try:
                return await self._client.call(m.SleepArgs(wanted, mode="abort", discard=True))
            except FastDeployError:
                asleep = await self._asleep()
                if _is_done(tags, asleep):  # a call to another API server was faster
                    return None
                if not asleep:
                    await self._client.call(m.ResumeArgs(CLEARED))
                raise

    async def load(self, tags: tuple[str, ...] = ()) -> dict[str, Any] | None:
        """Take the memory of ``tags`` back. When nothing sleeps any more, load the folder, and run again: pauses end,
        too. Return the report; None if the weights were not cleared.

        An engine that has had no update yet loads the folder in any case: it may have replaced one that died after it
        was cleared, and have read the folder before the trainer wrote it."""
        async with self._lock:
            holds = await self._holds()
            info = await self._client.call(m.WeightInfoArgs())
            if not info["asleep"] and not holds & {CLEARED, REPUBLISH} and info["weight_epoch"] > 0:
                return None
            if info["asleep"]:
                report = await self._client.call(m.WakeArgs(tags))
                if report.get("asleep"):
                    return report
            report = await self._client.call(m.UpdateWeightsArgs(FolderSource(self._folder), kv="recompute"))
            if CLEARED in holds:
                await self._client.call(m.ResumeArgs(CLEARED))
            await self._client.call(m.ResumeArgs())
            return report

    async def _holds(self) -> set[str]:
        status = await self._client.call(m.PauseStatusArgs())
        return {hold["id"] for hold in status.get("holds", ())}

    async def _asleep(self) -> set[str]:
        return set((await self._client.call(m.WeightInfoArgs()))["asleep"])


def _is_done(tags: tuple[str, ...], asleep: set[str]) -> bool:
    """Return whether all that ``tags`` name sleep. () = all tags."""
    return (set(tags) or TAGS) <= asleep
