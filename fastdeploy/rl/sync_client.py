"""RolloutClient for code without an event loop: the same methods, run on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Unpack

from fastdeploy.rl.client import GenerateOptions, RolloutClient
from fastdeploy.rl.errors import Report
from fastdeploy.rl.holds import new_hold_id, note_cleanup_failure
from fastdeploy.rl.loop_thread import LoopThread
from fastdeploy.rl.publish import Publication
from fastdeploy.rl.rollout import Rollout
from fastdeploy.rl.state_transfer import NamedTensors


class SyncRolloutClient:
    """RolloutClient with blocking methods and the same arguments. Many threads may call them at once. A call that is
    interrupted (Ctrl-C) cancels its work."""

    def __init__(self, urls: str | Sequence[str], **options: Any):
        self._thread = LoopThread("rollout-client")
        self._run = self._thread.run
        self._closed = False
        try:
            self._client = self._run(_make_client(urls, options))
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

    def generate(
        self,
        prompt_ids: Sequence[int] | None = None,
        params: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Rollout:
        return self._run(self._client.generate(prompt_ids, params, **options))

    def generate_group(
        self,
        prompt_ids: Sequence[int] | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout]:
        return self._run(self._client.generate_group(prompt_ids, params, n=n, **options))

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

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return self._run(self._client.render(messages, **options))

    def pause(self, mode: Literal["abort", "wait", "keep"] = "keep", **options: Any) -> list[Report]:
        return self._run(self._client.pause(mode, **options))

    def resume(self, hold_id: str | None = None) -> list[Report]:
        return self._run(self._client.resume(hold_id))

    @contextmanager
    def paused(self, mode: Literal["abort", "wait", "keep"] = "keep", **options: Any) -> Iterator[list[Report]]:
        """See RolloutClient.paused."""
        hold_id = new_hold_id()
        reports = self.pause(mode, hold_id=hold_id, **options)
        try:
            yield reports
        except BaseException as error:
            with note_cleanup_failure(error):
                self.resume(hold_id)
            raise
        self.resume(hold_id)

    def is_paused(self) -> bool:
        return self._run(self._client.is_paused())

    def abort_all(self) -> list[Report]:
        return self._run(self._client.abort_all())

    def publish(
        self, state: Mapping[str, Any] | NamedTensors, version: str | int | None = None, **options: Any
    ) -> Publication:
        return self._run(self._client.publish(state, version, **options))

    def update_weights(self, model_path: str, version: str | int | None = None, **options: Any) -> Publication:
        return self._run(self._client.update_weights(model_path, version, **options))

    def set_version(self, version: str | int) -> list[Report]:
        return self._run(self._client.set_version(version))

    def sleep(self, *tags: str, **options: Any) -> list[Report]:
        return self._run(self._client.sleep(*tags, **options))

    def wake(self, *tags: str) -> list[Report]:
        return self._run(self._client.wake(*tags))

    def reset(self, version: str | int | None = None) -> list[Report]:
        return self._run(self._client.reset(version))

    def health(self) -> list[Report]:
        return self._run(self._client.health())


async def _make_client(urls: str | Sequence[str], options: Mapping[str, Any]) -> RolloutClient:
    return RolloutClient(urls, **options)
