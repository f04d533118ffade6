"""RolloutClient: what a trainer imports to generate on one or many servers and to change their weights.

    async with RolloutClient(["http://a:8180", "http://b:8180"]) as client:
        rollout = await client.generate(prompt_ids, {"max_tokens": 512, "temperature": 1.0}, session_id=7)
        async with client.paused(mode="keep"):
            await client.publish(model.state_dict(), version="step-41")

Needs httpx, and neither Paddle nor torch. :class:`fastdeploy.rl.sync_client.SyncRolloutClient` has the same methods
for code without an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypedDict, Unpack

import httpx

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.continuation import Request
from fastdeploy.rl.errors import Report, TooStale
from fastdeploy.rl.fleet import fan_out, require_all
from fastdeploy.rl.generate import Runner
from fastdeploy.rl.pause import TTL_S, Holds, beside, new_hold_id
from fastdeploy.rl.publish import Publication, Publisher
from fastdeploy.rl.replica import Replica
from fastdeploy.rl.rollout import Rollout
from fastdeploy.rl.routing import Router
from fastdeploy.rl.staleness import Ledger
from fastdeploy.rl.state_source import Pairs, StateSource

OnStale = Literal["raise", "retry", "mark"]


class GenerateOptions(TypedDict, total=False):
    """messages: a chat instead of prompt_ids. session_id: one session stays on one replica (0 is a session too).
    request_id: of the first attempt; each later one has an id of its own that begins with this and "~".
    timeout_s: for everything, over all attempts. max_staleness: no token may come from weights that lack more than so
    many publications of this client; on_stale: then "raise" TooStale, "retry" from the prompt, or "mark" (the caller
    looks at ``staleness``)."""

    messages: Sequence[Mapping[str, Any]] | None
    session_id: Hashable | None
    request_id: str
    timeout_s: float
    max_staleness: int | None
    on_stale: OnStale


class RolloutClient:
    """urls: one per server. timeout_s, max_staleness, on_stale: defaults, see GenerateOptions. max_failures: in a row,
    without a token between them. silence_s: a stream without any sign of life for so long is broken. control_s: of a
    control call. eos_ids: of the model, if known (only used where an attempt is cut off right behind one). headers:
    sent with every request. hold_ttl_s: of the holds that a pause places, see :meth:`pause`. api_key, control_key: of
    the servers' data and control routes; by default FASTDEPLOY_API_KEY and FASTDEPLOY_CONTROL_KEY of the environment.
    control_urls: where the servers have their control routes at another port, one for each of ``urls``.

    A wrong key (401, 403) is raised at once, and never tried again.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        timeout_s: float = 3600.0,
        max_failures: int = 8,
        silence_s: float = 60.0,
        control_s: float = 60.0,
        eos_ids: Sequence[int] = (),
        max_staleness: int | None = None,
        on_stale: OnStale = "retry",
        headers: Mapping[str, str] | None = None,
        hold_ttl_s: float | None = TTL_S,
        api_key: str | None = None,
        control_key: str | None = None,
        control_urls: str | Sequence[str] | None = None,
    ):
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls or len(set(urls)) < len(urls):
            raise InvalidField("urls", f"expected at least one, and none twice, got {urls}")
        control = [control_urls] if isinstance(control_urls, str) else list(control_urls or urls)
        if len(control) != len(urls):
            raise InvalidField("control_urls", f"expected one for each of {len(urls)} urls, got {len(control)}")
        self._http = httpx.AsyncClient(headers=headers, limits=httpx.Limits(), trust_env=False)
        self.replicas = [
            Replica(url, self._http, api_key=api_key, control_key=control_key, control_url=control_url)
            for url, control_url in zip(urls, control, strict=True)
        ]
        self._router = Router(self.replicas)
        self._ledger = Ledger()
        self._runner = Runner(self._router, max_failures, silence_s)
        self._holds = Holds(self.replicas, hold_ttl_s)
        self._publisher = Publisher(self.replicas, self._router, self._ledger, self._holds)
        self._source = StateSource()
        self._control_s = control_s
        self._eos_ids = tuple(eos_ids)
        self._defaults: GenerateOptions = {
            "timeout_s": timeout_s,
            "max_staleness": max_staleness,
            "on_stale": on_stale,
        }

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, which cancels what still runs. Holds that :meth:`resume` has not released stand until
        their ttl ends."""
        await self._holds.close()
        await self._http.aclose()

    # ------------------------------------------------------------------ generation

    async def generate(
        self,
        prompt_ids: Sequence[int] | None = None,
        params: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Rollout:
        """One answer, whole, however often it was aborted, and however many replicas failed or paused meanwhile.

        params: as of /v1/completions, but without max_tokens the rest of the context may be filled; logprobs are asked
        for unless they say None. options: see GenerateOptions.
        Raises RolloutFailed with what there is, TooStale, or the error of a request that makes no sense.
        """
        return (await self.generate_group(prompt_ids, params, n=1, **options))[0]

    async def generate_group(
        self,
        prompt_ids: Sequence[int] | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout]:
        """``n`` answers to one prompt, which is computed once. See :meth:`generate`."""
        options = self._defaults | options
        messages, loop = options.get("messages"), asyncio.get_running_loop()
        if (prompt_ids is None) == (messages is None):
            raise InvalidField("prompt_ids", "expected either prompt_ids or messages")
        deadline = loop.time() + options["timeout_s"]
        prompt_ids = await self.render(messages) if prompt_ids is None else prompt_ids
        request = Request(prompt_ids, params or {}, n, options.get("request_id", ""), self._eos_ids)
        while True:
            choices = await self._runner.run(request, options.get("session_id"), deadline)
            rollouts = [self._ledger.label(choice.rollout()) for choice in choices]
            oldest, bound = max(r.staleness for r in rollouts), options["max_staleness"]
            if bound is None or oldest <= bound or options["on_stale"] == "mark":
                return rollouts
            if options["on_stale"] == "raise":
                raise TooStale(f"{oldest} publications behind, where {bound} are allowed", rollouts)
            request.start_over()

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a chat, by the server's template. options: further fields of a chat body."""
        body = {"messages": list(messages), **options}
        async with self._router.lease(None, 0) as replica:
            reply = await replica.call("POST", "/v1/chat/completions/render", self._control_s, json=body)
            return reply["token_ids"]

    # ------------------------------------------------------------------ pause

    async def pause(
        self,
        mode: Literal["abort", "wait", "keep"] = "keep",
        *,
        hold_id: str | None = None,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> list[Report]:
        """Pause all replicas with one hold; returns when all are quiesced. If one fails, none is left paused, and
        FleetError has a report per replica. options: clear_cache, admission, on_timeout, ttl_s of /v1/pause.

        The hold has a ttl (hold_ttl_s, or ttl_s here) that a thread renews until :meth:`resume` or :meth:`close`: if
        this process dies, the servers run again by themselves. With ttl_s None it stands for ever."""
        options |= {"mode": mode, "timeout_s": timeout_s}
        return await self._holds.pause(options, hold_id, timeout_s + self._control_s)

    async def resume(self, hold_id: str | None = None) -> list[Report]:
        """Release one hold on all replicas; without a name, every hold that this client placed. Raises HoldLost if a
        hold of this client had ended before: its ttl was not renewed in time, or an engine restarted."""
        reports = await self._holds.resume(hold_id, self._control_s)
        self._router.wake()
        return reports

    @asynccontextmanager
    async def paused(
        self, mode: Literal["abort", "wait", "keep"] = "keep", *, timeout_s: float = 60.0, **options: Any
    ) -> AsyncIterator[list[Report]]:
        """Pause all replicas inside the block, and resume them at its end, also after an exception or a cancellation.
        Raises HoldLost at the end if one ran before; an exception from inside is raised as it is, with a note of
        that."""
        hold_id = new_hold_id()
        reports = await self.pause(mode, hold_id=hold_id, timeout_s=timeout_s, **options)
        try:
            yield reports
        except BaseException as error:
            with beside(error):
                await self.resume(hold_id)
            raise
        await self.resume(hold_id)

    async def is_paused(self) -> bool:
        """Whether every replica is quiesced. Raises FleetError if one does not answer."""
        reports = await self._everywhere("GET", "/v1/is_paused", "the state is not known everywhere")
        return all(report.result["is_paused"] for report in reports)

    async def abort_all(self) -> list[Report]:
        """End everything in flight on all replicas, of whichever client; this client's generations go on from there."""
        return await self._everywhere("POST", "/v1/abort_requests", "the abort failed", {"abort_all": True})

    # ------------------------------------------------------------------ weights

    async def publish(
        self,
        state: Mapping[str, Any] | Pairs,
        version: str | int | None = None,
        *,
        partial: bool = False,
        changed_only: bool = False,
        kv: Literal["keep", "recompute"] = "keep",
        via: Literal["auto", "upload", "shared_memory", "folder"] = "auto",
        folder: str | None = None,
        chunk_mb: int = 256,
        deadline_s: float = 600.0,
        **options: Any,
    ) -> Publication:
        """Bring a state dict of Paddle, torch or numpy tensors, under the checkpoint's names, to all replicas: the
        tensors everywhere first, then the commits. If staging fails on one, no replica has committed (FleetError). The
        same holds if a hold of this client has ended meanwhile (HoldLost).

        state: may also be an (async) iterable of (name, tensor), which is never held whole.
        partial: the tensors that ``state`` lacks keep their value. changed_only: send only those that differ from what
        this client published last, as long as every replica serves that. via: how they travel; "auto" is shared memory
        if all replicas are on this host, else an upload; "folder" needs ``folder``, which all replicas can read.
        options: in_place, expected_version, lease_s of /v1/weights/begin.
        """
        async with self._publisher.lock:
            base = changed_only and await self._publisher.up_to_date()
            plan = await self._source.plan(state, base, chunk_mb << 20, via, folder, [r.url for r in self.replicas])
            begin = options | {"kv": kv, "partial": partial or plan.is_difference}
            if version is not None:
                begin["version"] = str(version)
            try:
                publication = await self._publisher.publish(begin, plan.chunks, deadline_s)
            except BaseException:
                self._source.forget()
                raise
            self._source.published(plan)
            return publication

    async def update_weights(
        self, model_path: str, version: str | int | None = None, *, deadline_s: float = 600.0, **options: Any
    ) -> Publication:
        """Load a checkpoint folder that all replicas can read, on all of them or on none. Without a version the label
        is made from the epoch. options: kv, partial, in_place, expected_version, lease_s."""

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            yield {"json": {"model_path": str(model_path)}}

        async with self._publisher.lock:
            begin = options if version is None else options | {"version": str(version)}
            self._source.forget()
            return await self._publisher.publish(begin, chunks, deadline_s)

    async def set_version(self, version: str | int) -> list[Report]:
        """Relabel the weights that serve. Nothing else changes."""
        body = {"version": str(version)}
        return await self._everywhere("POST", "/v1/update_weights", "the version was not set everywhere", body)

    async def sleep(self, *tags: str, **options: Any) -> list[Report]:
        """Give memory of all replicas back: "weight", "kv_cache", or both. options: mode, discard."""
        return await self._everywhere("POST", "/v1/sleep", "not all sleep", {"tags": list(tags)} | options)

    async def wake(self, *tags: str) -> list[Report]:
        """Take it again: the tags named, or all that sleep."""
        reports = await self._everywhere("POST", "/v1/wakeup", "not all are awake", {"tags": list(tags)})
        self._router.wake()
        return reports

    async def reset(self, version: str | int | None = None) -> list[Report]:
        """Start over: abort all requests, drop anonymous holds and open sessions, clear KV, relabel."""
        body = {} if version is None else {"version": str(version)}
        return await self._everywhere("POST", "/v1/reset", "not all were reset", body)

    # ------------------------------------------------------------------ health

    async def health(self) -> list[Report]:
        """Per replica, without raising: {"boot_id", "in_flight", "stale"}; stale: why it is left out, or None."""

        async def ask(replica: Replica) -> dict[str, Any]:
            boot_id = (await replica.call("GET", "/health")).get("boot_id")
            self._router.seen(replica, boot_id)
            return {"boot_id": boot_id, "in_flight": replica.in_flight, "stale": replica.stale}

        return await fan_out(self.replicas, ask, self._control_s)

    async def _everywhere(self, method: str, path: str, failure: str, body: dict | None = None) -> list[Report]:
        async def call(replica: Replica) -> dict[str, Any]:
            return await replica.call(method, path, self._control_s, **({} if body is None else {"json": body}))

        return require_all(failure, await fan_out(self.replicas, call, self._control_s))
