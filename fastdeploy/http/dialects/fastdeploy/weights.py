"""FastDeploy's way to new weights: clear them, have the trainer write the folder of the model, and load them again.

Between the two calls the named hold ``CLEARED`` stands, so every API server and every gateway knows the state.
"""

from __future__ import annotations

from typing import Any

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m

CLEARED = "fastdeploy-cleared"
PLACED_BY = "fastdeploy"
PAUSE_TIMEOUT_S = 60.0


class FolderWeights:
    """The weights in ``folder``, which this server was started with. A load that fails leaves the engine cleared, and
    may be called again."""

    def __init__(self, client: ServingClient, folder: str):
        self._client, self._folder = client, folder

    async def are_cleared(self) -> bool:
        """Return whether requests cannot be served until the weights are loaded again."""
        status = await self._client.call(m.PauseStatusArgs())
        return any(hold["id"] == CLEARED for hold in status.get("holds", ()))

    async def clear(self, tags: tuple[str, ...] = ()) -> dict[str, Any] | None:
        """End all requests with the tokens that they have, refuse new ones, and give the memory of ``tags`` back; () =
        all. The weights are not kept. Return the report; None if they were cleared already."""
        if await self.are_cleared():
            return None
        pause = m.PauseArgs("abort", True, "reject", PAUSE_TIMEOUT_S, hold_id=CLEARED, placed_by=PLACED_BY)
        await self._client.call(pause)
        try:
            return await self._client.call(m.SleepArgs(tags, mode="abort", discard=True))
        except FastDeployError:
            await self._client.call(m.ResumeArgs(CLEARED))
            raise

    async def load(self, tags: tuple[str, ...] = ()) -> dict[str, Any] | None:
        """Take the memory of ``tags`` back. When nothing sleeps any more, load the folder, and run again: pauses end,
        too. Return the report; None if the weights were not cleared."""
        if not await self.are_cleared():
            return None
        report: dict[str, Any] = {}
        if (await self._client.call(m.WeightInfoArgs()))["asleep"]:
            report = await self._client.call(m.WakeArgs(tags))
            if report.get("asleep"):
                return report
        report = await self._client.call(m.UpdateWeightsArgs(FolderSource(self._folder), kv="recompute"))
        await self._client.call(m.ResumeArgs(CLEARED))
        await self._client.call(m.ResumeArgs())
        return report
