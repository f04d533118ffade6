"""Generating the answer to one request, over as many attempts as needed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Hashable, Sequence

from fastdeploy.core.errors import FastDeployError, ModelNotFound
from fastdeploy.rl.connection import Connection
from fastdeploy.rl.continuation import PartialRollout, RolloutRequest
from fastdeploy.rl.errors import RolloutError, RolloutFailed, Unreachable, first_of_group, is_busy, is_retryable
from fastdeploy.rl.server_state import ServerState

MAX_SESSION_CHARS = 256


class RolloutGenerator:
    """The generator of answers. max_failures, silence_s: see RolloutClient. The stream of a frozen request is not
    silent: the server sends a comment every few seconds."""

    def __init__(self, connection: Connection, state: ServerState, max_failures: int, silence_s: float):
        self._connection = connection
        self._state = state
        self._max_failures = max_failures
        self._silence_s = silence_s

    async def generate(
        self, request: RolloutRequest, session: Hashable | None, deadline: float
    ) -> list[PartialRollout]:
        """Return all ``request.n`` choices, finished. deadline: on the event loop's clock. Raises RolloutFailed with
        the tokens so far, also if a choice ended with an error; or the error of an invalid request."""
        choices = [PartialRollout(request, k) for k in range(request.n)]
        request.adapter = self._state.adapters.get(request.lora_name or "")
        try:
            async with asyncio.timeout_at(deadline):
                await self._finish(choices, session)
        except TimeoutError as error:
            raise RolloutFailed("not finished in time", [c.rollout() for c in choices]) from error
        except TooManyFailures as error:
            raise RolloutFailed(error.message, [c.rollout() for c in choices]) from error.__cause__
        if failed := [c for c in choices if c.finish_reason == "error"]:
            which = ", ".join(f"{c.index} ({c.stop_reason})" for c in failed)
            raise RolloutFailed(f"choices that ended with an error: {which}", [c.rollout() for c in choices])
        return choices

    async def _finish(self, choices: Sequence[PartialRollout], session: Hashable | None) -> None:
        failures = 0
        while unfinished := [c for c in choices if c.finish_reason is None]:
            if len(choices) > 1 and (len(unfinished) < len(choices) or any(c.token_ids for c in choices)):
                await self._finish_apart(unfinished, session)
                return
            before = sum(len(c.token_ids) for c in choices)
            try:
                await self._attempt(choices, session)
            except FastDeployError as error:
                if not is_retryable(error):
                    raise
                failures = 0 if sum(len(c.token_ids) for c in choices) > before else failures
                failures += not is_busy(error)
                if failures > self._max_failures:
                    raise TooManyFailures(f"{failures} failures in a row: {error.message}") from error
            else:
                failures = 0

    async def _finish_apart(self, choices: Sequence[PartialRollout], session: Hashable | None) -> None:
        """Continue each unfinished choice of a group by a request of its own, since each has other tokens."""
        with first_of_group():
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._finish([choice], session))

    async def _attempt(self, choices: Sequence[PartialRollout], session: Hashable | None) -> None:
        """Ask for the rest of ``choices``. Raises the server's error; tokens received before it are kept. If the
        adapter was unloaded meanwhile, ends the choices: an adapter that was loaded since then is another one."""
        request, state = choices[0].request, self._state
        await state.until_usable(request.lora_name)
        if request.adapter is not None and state.adapters.get(request.lora_name or "") is not request.adapter:
            for choice in choices:
                choice.end_without_adapter()
            return
        for choice in choices:
            choice.begin_attempt()
        try:
            await self._stream(choices, session)
        except ModelNotFound as error:
            self._require_published(await state.ask_engine())
            if state.has_lost(request.lora_name):
                raise Unreachable("its engine restarted, and has lost the adapter") from error
            raise
        except FastDeployError as error:
            if all(choice.finish_reason is not None for choice in choices):
                return  # the error repeats a finish reason that is known already
            if is_retryable(error):
                state.note_refusal(error)
            for choice in choices:
                if choice.finish_reason is None:
                    choice.end_attempt_early()
            raise

    async def _stream(self, choices: Sequence[PartialRollout], session: Hashable | None) -> None:
        body = choices[0].request.body(choices)
        if session is not None:
            body["session"] = session_name(session)
        ended: set[int] = set()
        async with self._connection.stream("/v1/completions", body, self._silence_s) as events:
            async for event in events:
                if event is None:  # no token for a while: a restarted engine may wait for weights to be published
                    self._require_published(await self._state.ask_engine())
                    continue
                self._require_published(self._state.note_engine(event.get("system_fingerprint")))
                for item in event["choices"]:
                    choices[item["index"]].add_output(item, self._state.boot_id)
                    if item.get("finish_reason") is not None:
                        ended.add(item["index"])
                if event.get("usage"):
                    for choice in choices:
                        choice.add_usage(event["usage"])
        if len(ended) < len(choices):
            raise Unreachable("the stream ended before its last event")

    def _require_published(self, is_published: bool) -> None:
        """Raise Unreachable if the engine lost the published weights: its tokens must not be used."""
        if not is_published:
            raise Unreachable(self._state.stale or "")


def session_name(session: Hashable) -> str:
    """Return the name of a session for the server: the text of a number or short string, else a hash of its text."""
    text = str(session)
    if isinstance(session, int | str) and 0 < len(text) <= MAX_SESSION_CHARS:
        return text
    return hashlib.sha256(repr(session).encode("utf-8", "surrogatepass")).hexdigest()


class TooManyFailures(RolloutError):
    """The sign that a generation is given up. RolloutGenerator.generate turns it into RolloutFailed."""
