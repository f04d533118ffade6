"""Requests of a session: their engine requests, and the turns that their finished choices become."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from fastdeploy.client.choice import Choice, ChoiceDelta
from fastdeploy.client.generation import GenerationRequest
from fastdeploy.client.resubmission import LastingGeneration
from fastdeploy.http.context import ServingContext
from fastdeploy.http.openai.reply import weight_versions
from fastdeploy.http.sessions.store import SessionStore
from fastdeploy.http.sessions.turns_table import Turn

logger = logging.getLogger(__name__)
ShownChoice = Callable[[int, Choice], Awaitable[tuple[dict[str, Any], bytes | None]]]


def in_session(checked: GenerationRequest, uid: str) -> GenerationRequest:
    """Return engine requests that belong to a session: they survive aborts, and return log probabilities."""

    def of_session(sampling: Any) -> Any:
        return replace(sampling.seeded(), logprobs=sampling.logprobs or 0)

    requests = [
        replace(add, session=uid, survives_aborts=True, sampling=of_session(add.sampling)) for add in checked.requests
    ]
    return checked._replace(requests=requests)


class RecordedGeneration(LastingGeneration):
    """A generation whose choices become turns of a session, each before anyone gets its end. show: returns what a turn
    says of its answer, and the digest of its conversation. about: what all turns of this request say besides."""

    def __init__(
        self,
        context: ServingContext,
        store: SessionStore,
        checked: GenerationRequest,
        uid: str,
        show: ShownChoice,
        about: dict[str, Any],
    ):
        super().__init__(context.client, context.tokenizer, in_session(checked, uid), context.pace())
        self._store = store
        self._uid = uid
        self._show = show
        self._about = about
        self._model_name = context.model_name
        self._began = time.time()

    async def step(self) -> list[tuple[int, ChoiceDelta]]:
        """See Generation.step."""
        deltas = await super().step()
        for index, delta in deltas:
            if delta.finish_reason not in (None, "error"):
                await self._record(index)
        return deltas

    async def _record(self, index: int) -> None:
        choice, add = self.choices[index], self._requests[index // self.n]
        if not choice.token_ids:
            return
        shown, digest = await self._show(index, choice)
        welcome = self._client.welcome
        detail = {
            **shown,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "weight_versions": weight_versions(choice.spans),
            "request_id": self.request_id,
            "choice": index,
            "model": self._model_name(add.adapter),
            "boot_id": welcome.boot_id if welcome is not None else None,
            "seed": add.sampling.seed,
            "logprobs_mode": add.sampling.logprobs_mode,
            "began": self._began,
            "ended": time.time(),
            **self._about,
        }
        logprobs = [entry.logprob for entry in choice.logprobs]
        turn = Turn(add.prompt_token_ids, choice.token_ids, logprobs, digest, msgspec.json.encode(detail))
        if not await self._store.add(self._uid, turn):
            why = "its session was ended, or left for others (--max-sessions-mb, --session-ttl-s)"
            logger.warning("the turn of request %s in %s is not kept: %s", self.request_id, self._uid, why)
