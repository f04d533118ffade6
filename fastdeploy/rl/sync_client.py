"""RolloutClient for code without an event loop: the same methods, run on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from fastdeploy.core.loop_thread import LoopThread
from fastdeploy.rl.client import GenerateOptions, PauseMode, RolloutClient
from fastdeploy.rl.holds import new_hold_id, note_cleanup_failure
from fastdeploy.rl.rollout import Rollout
from fastdeploy.rl.sessions import AgentSession, SessionRow

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[RolloutClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncRolloutClient, P], T]:
    """Return the blocking form of a method of RolloutClient."""

    @wraps(method)
    def call(self: SyncRolloutClient, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._client, *args, **kwargs))

    return call


class SyncRolloutClient:
    """RolloutClient with blocking methods and the same arguments. Many threads may call them at once. A call that is
    interrupted (Ctrl-C) cancels its work."""

    def __init__(self, url: str, **options: Any):
        self._thread = LoopThread("rollout-client")
        self._run = self._thread.run
        self._closed = False
        try:
            self._client = self._run(_make_client(url, options))
        except BaseException:
            self._thread.stop()
            raise

    def __enter__(self) -> SyncRolloutClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; see RolloutClient.close. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._run(self._client.close())
            self._thread.stop()

    generate = _blocking(RolloutClient.generate)
    generate_group = _blocking(RolloutClient.generate_group)
    render = _blocking(RolloutClient.render)
    pause = _blocking(RolloutClient.pause)
    resume = _blocking(RolloutClient.resume)
    is_paused = _blocking(RolloutClient.is_paused)
    abort_all = _blocking(RolloutClient.abort_all)
    publish = _blocking(RolloutClient.publish)
    update_weights = _blocking(RolloutClient.update_weights)
    set_version = _blocking(RolloutClient.set_version)
    load_adapter = _blocking(RolloutClient.load_adapter)
    unload_adapter = _blocking(RolloutClient.unload_adapter)
    sleep = _blocking(RolloutClient.sleep)
    wake = _blocking(RolloutClient.wake)
    reset = _blocking(RolloutClient.reset)
    health = _blocking(RolloutClient.health)

    def session(self, name: str | None = None) -> SyncAgentSession:
        """See RolloutClient.session."""
        return SyncAgentSession(self._client.session(name), self._run)

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        params: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout]:
        """Generate one answer to each prompt, all at the same time; return them in the order of the prompts. Answer i
        has choice index i, so that equal prompts get different answers under one seed."""
        first = (params or {}).get("first_choice", 0)
        numbered = [{**(params or {}), "first_choice": first + i} for i in range(len(prompts))]

        async def many() -> list[Rollout]:
            pairs = zip(prompts, numbered, strict=True)
            return list(await asyncio.gather(*(self._client.generate(p, own, **options) for p, own in pairs)))

        return self._run(many())

    @contextmanager
    def paused(
        self, mode: PauseMode = "keep", *, lora_name: str | None = None, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """See RolloutClient.paused."""
        hold_id = new_hold_id()
        report = self.pause(mode, lora_name=lora_name, hold_id=hold_id, **options)
        try:
            yield report
        except BaseException as error:
            with note_cleanup_failure(error):
                self.resume(hold_id, lora_name=lora_name)
            raise
        self.resume(hold_id, lora_name=lora_name)


async def _make_client(url: str, options: Mapping[str, Any]) -> RolloutClient:
    return RolloutClient(url, **options)


class SyncAgentSession:
    """AgentSession with blocking methods. run: runs a coroutine on the client's loop."""

    def __init__(self, session: AgentSession, run: Callable[[Coroutine[Any, Any, Any]], Any]):
        self._session = session
        self._run = run
        self.name, self.api_key = session.name, session.api_key
        self.openai_url, self.anthropic_url = session.openai_url, session.anthropic_url

    def __enter__(self) -> SyncAgentSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def rows(self) -> list[SessionRow]:
        """See AgentSession.rows."""
        return self._run(self._session.rows())

    def abort(self) -> list[dict[str, Any]]:
        """See AgentSession.abort."""
        return self._run(self._session.abort())

    def end(self) -> None:
        """See AgentSession.end."""
        self._run(self._session.end())
