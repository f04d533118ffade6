"""RolloutClient: generate on one or many servers, pause them, and change their weights.

    async with RolloutClient(["http://a:8180", "http://b:8180"]) as client:
        rollout = await client.generate(prompt_ids, {"max_tokens": 512, "temperature": 1.0}, session_id=7)
        async with client.paused(mode="keep"):
            await client.publish(model.state_dict(), version="step-41")
        await client.load_adapter("tenant-a", "/checkpoints/tenant-a/step-7")
        rollout = await client.generate(prompt_ids, {"max_tokens": 512}, lora_name="tenant-a")

Needs httpx, and neither Paddle nor torch. :class:`fastdeploy.rl.sync_client.SyncRolloutClient` has the same methods
for code without an event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypedDict, Unpack

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.adapter_upload import adapter_upload
from fastdeploy.rl.adapters import Adapters
from fastdeploy.rl.continuation import RolloutRequest
from fastdeploy.rl.errors import Report, TooStale
from fastdeploy.rl.fan_out import fan_out, require_all
from fastdeploy.rl.generate import RolloutGenerator
from fastdeploy.rl.hold_renewal import Hold
from fastdeploy.rl.holds import TTL_S, Holds, new_hold_id, note_cleanup_failure
from fastdeploy.rl.part_calls import Means
from fastdeploy.rl.publish import Publication, Publisher
from fastdeploy.rl.published_state import PublishedState
from fastdeploy.rl.replica import Replica, http_client
from fastdeploy.rl.rollout import Rollout
from fastdeploy.rl.routing import Router
from fastdeploy.rl.staleness import PublicationLedger
from fastdeploy.rl.state_transfer import FolderTransfer, NamedTensors

OnStale = Literal["raise", "retry", "mark"]


class GenerateOptions(TypedDict, total=False):
    """Options of one generation.

    messages: a chat, instead of prompt_ids. lora_name: the adapter that computes the answer; None: the base model.
    session_id: requests of one session go to one replica; 0 is a session too.
    request_id: id of the first attempt; a later attempt has this id, "~" and a suffix. timeout_s: limit for all
    attempts together. max_staleness: greatest number of this client's publications (with an adapter: of its loads of
    this adapter) that a token's weights may lack.
    on_stale: with a token beyond that limit, "raise" TooStale, "retry" from the prompt, or "mark" (return the rollout
    with its ``staleness``)."""

    messages: Sequence[Mapping[str, Any]] | None
    lora_name: str | None
    session_id: Hashable | None
    request_id: str
    timeout_s: float
    max_staleness: int | None
    on_stale: OnStale


class RolloutClient:
    """Client of one or many servers ("replicas") that serve the same model.

    urls: one per server. timeout_s, max_staleness, on_stale: defaults of GenerateOptions. max_failures: failures in a
    row, without a token between them, after which a generation is given up. silence_s: time without any byte after
    which a stream counts as broken. control_s: limit of a control call. eos_ids: end-of-sequence ids of the model, used
    only for an attempt that was aborted right after one of them. headers: sent with every request. hold_ttl_s: see
    :meth:`pause`. api_key, control_key: keys of the data and control routes (default: FASTDEPLOY_API_KEY and
    FASTDEPLOY_CONTROL_KEY of the environment). control_urls: one per server, if control routes have their own port.

    A wrong key (401, 403) raises at once, without another attempt.
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
            raise InvalidField("urls", f"expected one or more different urls, got {urls}")
        control = [control_urls] if isinstance(control_urls, str) else list(control_urls or urls)
        if len(control) != len(urls):
            raise InvalidField("control_urls", f"expected one for each of {len(urls)} urls, got {len(control)}")
        self._http = http_client(headers)
        self.replicas = [
            Replica(url, self._http, api_key=api_key, control_key=control_key, control_url=control_url)
            for url, control_url in zip(urls, control, strict=True)
        ]
        self._router = Router(self.replicas)
        self._ledger = PublicationLedger()
        self._generator = RolloutGenerator(self._router, max_failures, silence_s)
        self._holds = Holds(self.replicas, hold_ttl_s)
        self._adapters = Adapters(self.replicas, self._router, self._holds)
        self._publisher = Publisher(self.replicas, self._router, self._ledger, self._holds)
        self._published_state = PublishedState()
        self._control_s = control_s
        self._eos_ids = tuple(eos_ids)
        self._defaults = GenerateOptions(timeout_s=timeout_s, max_staleness=max_staleness, on_stale=on_stale)

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections and cancel running generations. Holds that were not released end by their ttl."""
        await self._holds.close()
        await self._http.aclose()

    # ------------------------------------------------------------------ generation

    async def generate(
        self,
        prompt_ids: Sequence[int] | None = None,
        params: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Rollout:
        """Return one complete answer. Aborts, pauses and failed replicas delay the answer and do not change it.

        params: fields of /v1/completions. Without max_tokens, the answer may fill the rest of the context. Logprobs are
        returned unless ``params["logprobs"]`` is None.
        Raises RolloutFailed (with the tokens so far), TooStale, or the error of an invalid request.
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
        """Return ``n`` answers to one prompt, which is computed once. See :meth:`generate`."""
        options = self._defaults | options
        messages = options.get("messages")
        if (prompt_ids is None) == (messages is None):
            raise InvalidField("prompt_ids", "expected either prompt_ids or messages")
        deadline = asyncio.get_running_loop().time() + options["timeout_s"]
        if messages is not None:
            prompt_ids = await self.render(messages)
        assert prompt_ids is not None
        lora_name = options.get("lora_name")
        request = RolloutRequest(prompt_ids, params or {}, n, options.get("request_id", ""), self._eos_ids, lora_name)
        while True:
            choices = await self._generator.generate(request, options.get("session_id"), deadline)
            ledger = self._ledger if lora_name is None else self._adapters.ledger(lora_name)
            rollouts = [ledger.with_staleness(choice.rollout()) for choice in choices]
            oldest, bound = max(r.staleness for r in rollouts), options["max_staleness"]
            if bound is None or oldest <= bound or options["on_stale"] == "mark":
                return rollouts
            if options["on_stale"] == "raise":
                raise TooStale(f"{oldest} publications behind, where {bound} are allowed", rollouts)
            request.start_over()

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of a chat, by the server's chat template. options: further fields of the chat body."""
        body = {"messages": list(messages), **options}
        async with self._router.reserve(None, 0) as replica:
            reply = await replica.call("POST", "/v1/chat/completions/render", self._control_s, json=body)
            return reply["token_ids"]

    # ------------------------------------------------------------------ pause

    async def pause(
        self,
        mode: Literal["abort", "wait", "keep"] = "keep",
        *,
        lora_name: str | None = None,
        hold_id: str | None = None,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> list[Report]:
        """Pause all replicas with one hold; return when all are quiesced. If the pause of one replica fails, all are
        resumed, and FleetError has a report per replica. lora_name: pause the requests of this adapter only. options:
        clear_cache, admission, on_timeout, ttl_s of /v1/pause.

        A thread renews the hold's ttl (ttl_s, by default hold_ttl_s) until :meth:`resume` or :meth:`close`. If this
        process dies, the ttl ends and the servers run again. A hold with ttl_s None does not end by itself."""
        options |= {"mode": mode, "timeout_s": timeout_s}
        hold = Hold(hold_id or new_hold_id(), lora_name)
        return await self._holds.pause(hold, options, timeout_s + self._control_s)

    async def resume(self, hold_id: str | None = None, *, lora_name: str | None = None) -> list[Report]:
        """Release one hold on all replicas: of the engine, or of the adapter ``lora_name``. hold_id None: every hold of
        this client, or of this client on that adapter. Raises HoldLost if a hold of this client had ended before,
        because its ttl was not renewed in time or an engine restarted."""
        if hold_id is None:
            reports = await self._holds.resume_all(self._control_s, lora_name)
        else:
            reports = await self._holds.resume(Hold(hold_id, lora_name), self._control_s)
        self._router.retry_now()
        return reports

    @asynccontextmanager
    async def paused(
        self,
        mode: Literal["abort", "wait", "keep"] = "keep",
        *,
        lora_name: str | None = None,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> AsyncIterator[list[Report]]:
        """Pause all replicas (with lora_name: that adapter on all of them) inside the block, and resume them at its
        end, also after an exception or a cancellation.
        Raises HoldLost at the end if the hold had ended early on a replica. If the block raises, its exception gets the
        message of HoldLost as a note instead."""
        hold_id = new_hold_id()
        reports = await self.pause(mode, lora_name=lora_name, hold_id=hold_id, timeout_s=timeout_s, **options)
        try:
            yield reports
        except BaseException as error:
            with note_cleanup_failure(error):
                await self.resume(hold_id, lora_name=lora_name)
            raise
        await self.resume(hold_id, lora_name=lora_name)

    async def is_paused(self, *, lora_name: str | None = None) -> bool:
        """Return whether every replica is quiesced; with lora_name, whether that adapter is on every replica. Raises
        FleetError if one does not answer."""
        scope = None if lora_name is None else {"lora_name": lora_name}
        reports = await self._call_all("GET", "/v1/is_paused", "the pause state of a replica is unknown", params=scope)
        return all(report.unwrap()["is_paused"] for report in reports)

    async def abort_all(self, *, lora_name: str | None = None) -> list[Report]:
        """Abort all requests of all clients on all replicas; with lora_name, all requests of that adapter. This client
        continues its own generations afterwards."""
        body = {"abort_all": True} if lora_name is None else {"lora_name": lora_name}
        return await self._call_all("POST", "/v1/abort_requests", "the abort failed", body)

    # ------------------------------------------------------------------ weights

    async def publish(
        self,
        state: Mapping[str, Any] | NamedTensors,
        version: str | int | None = None,
        *,
        partial: bool = False,
        delta: Literal["auto", "never"] = "auto",
        kv: Literal["keep", "recompute"] = "keep",
        via: Literal["auto", "upload", "shared_memory", "folder"] = "auto",
        folder: str | None = None,
        compression: Literal["auto", "none", "zstd"] = "auto",
        chunk_mb: int = 256,
        deadline_s: float = 600.0,
        **options: Any,
    ) -> Publication:
        """Publish a state dict to all replicas: first stage the tensors on every replica, then commit them. If staging
        fails on one replica, none commits (FleetError). If a hold of this client ended early, none commits (HoldLost).

        state: Paddle, torch or numpy tensors by their name in the checkpoint; or an (async) iterable of (name, tensor)
        pairs, which is read part by part and is never in memory as a whole.
        partial: tensors that ``state`` lacks keep their value.
        delta: "auto" keeps a copy of the state in the dtype of the replicas, and sends the next one as its difference
        from this copy. A replica that serves other weights than this copy, for example after a restart, is sent the
        whole; so are all if the difference is hardly smaller. "never" keeps no copy. A stream is always sent whole.
        via: the way to send tensors; "auto" takes shared memory if all replicas are on this host, else an upload;
        "folder" needs ``folder``, readable by all replicas. compression: of differences; "auto" takes zstd unless all
        replicas are on this host. options: in_place, expected_version, lease_s of /v1/weights/begin.
        Raises WrongWeights, in a FleetError, for a replica that serves other weights after the commit.
        """
        means = Means(via, folder, chunk_mb << 20, compression)
        begin = options | {"kv": kv, "partial": partial}
        if version is not None:
            begin["version"] = str(version)
        async with self._publisher.lock:
            transfer = await self._published_state.transfer(state, delta, means, begin)
            async with self._published_state.publishing(transfer):
                return await self._publisher.publish(begin, transfer, deadline_s)

    async def update_weights(
        self, model_path: str, version: str | int | None = None, *, deadline_s: float = 600.0, **options: Any
    ) -> Publication:
        """Load a checkpoint folder, which all replicas can read, on all of them or on none. version None: each replica
        makes a label from its weight_epoch. options: kv, partial, in_place, expected_version, lease_s."""
        async with self._publisher.lock:
            begin = options if version is None else options | {"version": str(version)}
            self._published_state.forget()
            return await self._publisher.publish(begin, FolderTransfer(str(model_path)), deadline_s)

    async def set_version(self, version: str | int) -> list[Report]:
        """Give the served weights another version label. Nothing else changes."""
        body = {"version": str(version)}
        return await self._call_all("POST", "/v1/update_weights", "the version was not set everywhere", body)

    # ------------------------------------------------------------------ adapters

    async def load_adapter(
        self,
        lora_name: str,
        adapter: str | os.PathLike[str] | Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
        *,
        version: str | int | None = None,
        kv: Literal["keep", "recompute"] = "keep",
        via: Literal["auto", "upload", "shared_memory"] = "auto",
        deadline_s: float = 600.0,
    ) -> Publication:
        """Load an adapter under a name on all replicas, or replace the adapter of that name between two steps.

        adapter: a PEFT folder that all replicas can read, which may be deleted afterwards; or the tensors of such a
        folder by their names in it (``peft.get_peft_model_state_dict(model)``), with ``config``, the content of its
        adapter_config.json (``peft_config.to_dict()``). version: label; None: each replica makes a label from its
        adapter_epoch. kv, via: see :meth:`publish`.
        A replica that refuses the adapter keeps the one that it has, and gets no requests of this name until a load
        succeeds there (FleetError). If a hold of this client on the engine or on this adapter ended early, no replica
        loads (HoldLost)."""
        fields: dict[str, Any] = {"lora_name": lora_name, "kv": kv}
        if version is not None:
            fields["version"] = str(version)
        urls = [replica.url for replica in self.replicas]
        async with adapter_upload(adapter, config, fields, via, urls) as upload:
            return await self._adapters.load(lora_name, upload, deadline_s)

    async def unload_adapter(self, lora_name: str) -> list[Report]:
        """Remove a name from all replicas at once. Its running requests finish on the weights that they have. A
        generation that has to be continued after that ends with the tokens that it has (finish_reason "abort",
        stop_reason "adapter_unloaded"), also if another adapter was loaded under the name. Raises ModelNotFound if no
        replica knows the name."""
        return await self._adapters.unload(lora_name, self._control_s)

    # ------------------------------------------------------------------ memory

    async def sleep(self, *tags: str, **options: Any) -> list[Report]:
        """Free memory on all replicas. tags: "weight", "kv_cache", or both. options: mode, discard."""
        return await self._call_all("POST", "/v1/sleep", "not all sleep", {"tags": list(tags)} | options)

    async def wake(self, *tags: str) -> list[Report]:
        """Allocate the memory of ``tags`` again; without tags, of everything that sleeps."""
        reports = await self._call_all("POST", "/v1/wakeup", "not all are awake", {"tags": list(tags)})
        self._router.retry_now()
        return reports

    async def reset(self, version: str | int | None = None) -> list[Report]:
        """Abort all requests, drop anonymous holds and open weight sessions, unload all adapters, clear the KV cache,
        set the version."""
        body = {} if version is None else {"version": str(version)}
        self._adapters.forget_all()
        return await self._call_all("POST", "/v1/reset", "not all were reset", body)

    # ------------------------------------------------------------------ health

    async def health(self) -> list[Report]:
        """Return a report per replica, without raising: {"boot_id", "in_flight", "stale"}. stale: why the replica gets
        no requests, or None."""

        async def ask(replica: Replica) -> dict[str, Any]:
            boot_id = (await replica.call("GET", "/health")).get("boot_id")
            self._router.note_engine(replica, boot_id)
            return {"boot_id": boot_id, "in_flight": replica.in_flight, "stale": replica.stale}

        return await fan_out(self.replicas, ask, self._control_s)

    async def _call_all(
        self, method: str, path: str, failure: str, body: dict | None = None, params: dict | None = None
    ) -> list[Report]:
        limit = self._control_s
        reports = await fan_out(self.replicas, lambda r: r.call(method, path, limit, json=body, params=params), limit)
        return require_all(failure, reports)
