"""Weight updates by SGLang's calls, which name no session."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.weight_source import Source
from fastdeploy.http.dialects.common import place_pause
from fastdeploy.inter_communicator import messages as m

PLACED_BY = "sglang"
# The hold around one commit ends by itself after this time if the API server dies before it releases the hold.
COMMIT_HOLD_TTL_S = 300.0


class Update(NamedTuple):
    """The tensors of one call. sources: at least one. abort_all: end the requests in flight, and start none until the
    new weights serve; an update that is refused aborts nothing. partial: tensors that do not arrive keep their value.
    flush: drop the prefix cache."""

    sources: Sequence[Source]
    version: str | None
    abort_all: bool
    flush: bool
    partial: bool


class WeightUpdates:
    """Weight updates by calls that may reach any API server. The engine knows which session is open."""

    def __init__(self, client: ServingClient):
        self._client = client

    async def begin(self) -> dict[str, Any]:
        return await self._client.call(m.BeginUpdateArgs(partial=True, placed_by=PLACED_BY))

    async def add(self, update: Update) -> dict[str, Any]:
        """Add the tensors to SGLang's open session. Without an open session the tensors are an update of their own,
        which is committed at once."""
        first, *others = update.sources
        receipt = await self._client.call(m.UpdatePartArgs(None, first, update.version, placed_by=PLACED_BY))
        session_id = receipt["session_id"]
        if session_id is None:
            return await self._publish(update)
        for source in others:
            receipt = await self._client.call(m.UpdatePartArgs(session_id, source, update.version))
        if update.abort_all:
            await self._client.call(m.AbortArgs(abort_all=True))
        return receipt

    async def end(self, version: str | None) -> dict[str, Any]:
        """Commit the open session. Raises WrongOrder if there is none."""
        report = await self._client.call(m.CommitUpdateArgs(None, version=version, placed_by=PLACED_BY))
        await self._flush()
        return report

    async def _flush(self) -> None:
        """Free the cached blocks of older weights at once. No request would match them again."""
        await self._client.call(m.ResetCacheArgs())

    async def _publish(self, update: Update) -> dict[str, Any]:
        version, partial = update.version, update.partial
        if len(update.sources) == 1 and not update.abort_all:
            args = m.UpdateWeightsArgs(update.sources[0], version=version, partial=partial)
            report = await self._client.call(args)
        else:
            report = await self._publish_in_steps(update)
        if update.flush:
            await self._flush()
        return report

    async def _publish_in_steps(self, update: Update) -> dict[str, Any]:
        """Publish by a session of this call alone: no other call adds to the session."""
        placed_by = f"{PLACED_BY} (one call)"
        begin = m.BeginUpdateArgs(version=update.version, partial=update.partial, placed_by=placed_by)
        session_id = (await self._client.call(begin))["session_id"]
        try:
            for source in update.sources:
                await self._client.call(m.UpdatePartArgs(session_id, source))
            commit = m.CommitUpdateArgs(session_id)
            return await (self._commit_alone(commit) if update.abort_all else self._client.call(commit))
        except BaseException:
            with contextlib.suppress(FastDeployError):
                await self._client.call(m.AbortUpdateArgs(session_id))
            raise

    async def _commit_alone(self, commit: m.CommitUpdateArgs) -> dict[str, Any]:
        """Commit while no request is in flight. The pause for that has a hold of its own, so that an engine that was
        paused before stays paused."""
        hold_id = f"update-{commit.session_id}"
        try:
            await place_pause(self._client, "abort", None, PLACED_BY, COMMIT_HOLD_TTL_S, hold_id)
            return await self._client.call(commit)
        finally:
            await self._client.call(m.ResumeArgs(hold_id=hold_id))
