"""Running one request to its end, over as many attempts and replicas as that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Any

from fastdeploy.core.errors import FastDeployError
from fastdeploy.rl.continuation import Partial, Request
from fastdeploy.rl.errors import RolloutError, RolloutFailed, Unreachable, is_busy, may_pass
from fastdeploy.rl.replica import Replica
from fastdeploy.rl.routing import Router


class Runner:
    """max_failures: failures in a row without a token between them, after which a request is given up. silence_s: a
    stream that shows no sign of life for so long is broken (a frozen one shows some every few seconds)."""

    def __init__(self, router: Router, max_failures: int, silence_s: float):
        self._router = router
        self._max_failures = max_failures
        self._silence_s = silence_s

    async def run(self, request: Request, session: Hashable | None, deadline: float) -> list[Partial]:
        """All ``request.n`` choices, finished. deadline: on the loop's clock. Raises RolloutFailed with what there is
        of them, also if one ended with an error of its own, or the error of a request that no replica would take."""
        choices = [Partial(request, k) for k in range(request.n)]
        try:
            async with asyncio.timeout_at(deadline):
                await self._finish(request, choices, session)
        except TimeoutError as error:
            raise RolloutFailed("not finished in time", [c.rollout() for c in choices]) from error
        except GivenUp as error:
            raise RolloutFailed(error.message, [c.rollout() for c in choices]) from error.__cause__
        if failed := [c for c in choices if c.finish_reason == "error"]:
            which = ", ".join(f"{c.index} ({c.stop_reason})" for c in failed)
            raise RolloutFailed(f"choices that ended with an error: {which}", [c.rollout() for c in choices])
        return choices

    async def _finish(self, request: Request, choices: Sequence[Partial], session: Hashable | None) -> None:
        failures = 0
        while unfinished := [c for c in choices if c.finish_reason is None]:
            if len(choices) > 1 and (len(unfinished) < len(choices) or any(c.token_ids for c in choices)):
                await self._finish_apart(request, unfinished, session)
                return
            before = sum(len(c.token_ids) for c in choices)
            try:
                await self._attempt(request, choices, session)
            except FastDeployError as error:
                if not may_pass(error):
                    raise
                failures = 0 if sum(len(c.token_ids) for c in choices) > before else failures
                failures += not is_busy(error)
                if failures > self._max_failures:
                    raise GivenUp(f"{failures} failures in a row: {error.message}") from error
            else:
                failures = 0

    async def _finish_apart(self, request: Request, choices: Sequence[Partial], session: Hashable | None) -> None:
        """What is left of a group goes on one by one: each has tokens of its own to go on from."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._finish(request, [choice], session))
        except* FastDeployError as failed:
            raise failed.exceptions[0] from None

    async def _attempt(self, request: Request, choices: Sequence[Partial], session: Hashable | None) -> None:
        """Send what is left of ``choices`` and take what comes. Raises what the replica answered; whatever came
        before is kept."""
        async with self._router.lease(session, len(choices)) as replica:
            for choice in choices:
                choice.begin(replica.url)
            try:
                await self._stream(replica, request, choices)
            except FastDeployError as error:
                if all(choice.finish_reason is not None for choice in choices):
                    return  # each has told its own end, and the error only repeats it
                if may_pass(error):
                    self._router.refused(replica, error)
                for choice in choices:
                    if choice.finish_reason is None:
                        choice.cut_off()
                raise

    async def _stream(self, replica: Replica, request: Request, choices: Sequence[Partial]) -> None:
        body = request.body(choices)
        ended: set[int] = set()
        async with replica.stream("/v1/completions", body, self._silence_s) as events:
            async for event in events:
                if event is None:
                    await self._check_engine(replica)
                    continue
                self._note_engine(replica, event)
                for item in event["choices"]:
                    choices[item["index"]].take(item, replica.boot_id)
                    if item.get("finish_reason") is not None:
                        ended.add(item["index"])
        for choice in choices:  # a group has one prompt: its logprobs come once
            choice.prompt_logprobs = choice.prompt_logprobs or choices[0].prompt_logprobs
        if len(ended) < len(choices):
            raise Unreachable("the stream ended before its last chunk")

    def _note_engine(self, replica: Replica, event: dict[str, Any]) -> None:
        """A chunk names the engine that made it. Tokens of one that lost the published weights are not taken."""
        if not self._router.seen(replica, event.get("system_fingerprint")):
            raise Unreachable(replica.stale or "")

    async def _check_engine(self, replica: Replica) -> None:
        """A frozen stream may wait on an engine that restarted and is held until weights are published again."""
        health = await replica.call("GET", "/health")
        if not self._router.seen(replica, health.get("boot_id")):
            raise Unreachable(replica.stale or "")


class GivenUp(RolloutError):
    """Too many failures in a row."""
