"""Weight sessions by SGLang's calls, which name none."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.weight_source import Source
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.common import PAUSE_TIMEOUT_S
from fastdeploy.inter_communicator import messages as m

PLACED_BY = "sglang"
COMMIT_HOLD_TTL_S = 300.0  # of the hold around one commit, if this API server dies before it releases the hold


class Update(NamedTuple):
    """abort_all: requests in flight end with what they have and none begins until the new weights serve; not before
    these are checked and ready. partial: tensors that do not arrive keep their value."""

    sources: list[Source]
    version: str | None
    abort_all: bool
    flush: bool
    partial: bool


class SGLangWeights:
    """Weight updates by SGLang's calls, which name no session and may reach any API server. The engine knows which
    session is open."""

    def __init__(self, context: ServingContext):
        self._context = context

    async def call(self, args: m.Args) -> dict[str, Any]:
        return await self._context.client.call(args)

    async def flush(self) -> None:
        """Blocks of older weights are never matched again; this gives them back at once. No request is disturbed."""
        await self._context.client.call(m.ResetCacheArgs())

    async def open_session(self) -> str | None:
        """The open session of SGLang's routes, if there is one; not that of another trainer."""
        session = (await self.call(m.WeightInfoArgs())).get("session") or {}
        return session["session_id"] if session.get("placed_by") == PLACED_BY else None

    async def add(self, update: Update) -> dict[str, Any]:
        """Put the sources into the open session, to be committed with it; or make an update of them at once."""
        session_id = await self.open_session()
        if session_id is None:
            report = await self._publish(update)
            if update.flush:
                await self.flush()
            return report
        receipts = [await self.call(m.UpdateChunkArgs(session_id, s, update.version)) for s in update.sources]
        if update.abort_all:
            await self.call(m.AbortArgs(abort_all=True))
        return receipts[-1]

    async def _publish(self, update: Update) -> dict[str, Any]:
        version, partial = update.version, update.partial
        if len(update.sources) == 1 and not update.abort_all:
            return await self.call(m.UpdateWeightsArgs(update.sources[0], version=version, partial=partial))
        args = m.BeginUpdateArgs(version=version, partial=partial, placed_by=f"{PLACED_BY} (one call)")
        begun = await self.call(args)
        session_id = begun["session_id"]
        try:
            for source in update.sources:
                await self.call(m.UpdateChunkArgs(session_id, source))
            return await (self._commit_alone(session_id) if update.abort_all else self._commit(session_id))
        except BaseException:
            with contextlib.suppress(FastDeployError):
                await self.call(m.AbortUpdateArgs(session_id))
            raise

    async def _commit(self, session_id: str) -> dict[str, Any]:
        return await self.call(m.CommitUpdateArgs(session_id))

    async def _commit_alone(self, session_id: str) -> dict[str, Any]:
        """Commit with nothing in flight. This call has a hold of its own, so that an engine that was paused before
        stays paused."""
        hold_id = f"update-{session_id}"
        pause = m.PauseArgs(
            mode="abort",
            admission="hold",
            timeout_s=PAUSE_TIMEOUT_S,
            on_timeout="keep",
            ttl_s=COMMIT_HOLD_TTL_S,
            hold_id=hold_id,
            placed_by=PLACED_BY,
        )
        try:
            await self._context.client.call(pause)
            return await self._commit(session_id)
        finally:
            await self._context.client.call(m.ResumeArgs(hold_id=hold_id))
