"""RolloutClient: generate on a server or a fleet, pause it, and change its weights.

    async with RolloutClient("http://localhost:8180") as client:
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
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypedDict, Unpack

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.connection import Connection
from fastdeploy.rl.continuation import RolloutRequest
from fastdeploy.rl.generate import RolloutGenerator
from fastdeploy.rl.holds import TTL_S, Hold, Holds, new_hold_id, note_cleanup_failure
from fastdeploy.rl.publish import Adapters, Publication, Publisher, SessionOptions
from fastdeploy.rl.rollout import Rollout
from fastdeploy.rl.server_state import ServerState
from fastdeploy.rl.sessions import AgentSession
from fastdeploy.rl.staleness import OnStale, is_fresh_enough
from fastdeploy.rl.state_transfer import NamedTensors
from fastdeploy.rl.uploads import MemoryVia, SendOptions, Via, adapter_call

PauseMode = Literal["abort", "wait", "keep"]


class GenerateOptions(TypedDict, total=False):
    """Options of one generation.

    messages: a chat, instead of prompt_ids. lora_name: the adapter that computes the answer; None: the base model.
    session_id: a fleet sends the requests of one session to one replica; 0 is a session too.
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
    """Client of one address: a server, or the gateway of a fleet, which does each call on all of its replicas or on
    none. Its reports and errors (``detail``) have "replicas" then, with an entry for each.

    timeout_s, max_staleness, on_stale: defaults of GenerateOptions. max_failures: failures in a row, without a token
    between them, after which a generation is given up. silence_s: time without any byte after which a stream counts as
    broken. control_s: limit of a control call. eos_ids: end-of-sequence ids of the model, used only for an attempt that
    was aborted right after one of them. headers: sent with every request. hold_ttl_s: see :meth:`pause`. api_key,
    control_key: keys of the data and control routes (default: FASTDEPLOY_API_KEY and FASTDEPLOY_CONTROL_KEY of the
    environment). control_url: address of the control routes, if they have a port of their own.

    A wrong key (401, 403) raises at once, without another attempt.
    """

    def __init__(
        self,
        url: str,
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
        control_url: str | None = None,
    ):
        keys = {"api_key": api_key, "control_key": control_key}
        self.connection = Connection(url, control_url=control_url, headers=headers, **keys)
        self._state = ServerState(self.connection)
        self._generator = RolloutGenerator(self.connection, self._state, max_failures, silence_s)
        self._holds = Holds(self.connection, hold_ttl_s)
        self._adapters = Adapters(self.connection, self._state, self._holds)
        self._publisher = Publisher(self.connection, self._state, self._holds)
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
        await self.connection.close()

    # ------------------------------------------------------------------ generation

    async def generate(
        self,
        prompt_ids: Sequence[int] | None = None,
        params: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Rollout:
        """Return one complete answer. Aborts, pauses and failures of the server delay the answer and do not change it.

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
            ledger = self._publisher.ledger if lora_name is None else self._adapters.ledger(lora_name)
            rollouts = [ledger.with_staleness(choice.rollout()) for choice in choices]
            if is_fresh_enough(rollouts, options["max_staleness"], options["on_stale"]):
                return rollouts
            request.start_over()

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of a chat, by the server's chat template. options: further fields of the chat body."""
        await self._state.until_usable(None)
        return (await self._post("chat/completions/render", messages=list(messages), **options))["token_ids"]

    def session(self, name: str | None = None) -> AgentSession:
        """Return a session for an agent that has a client of its own. name: of the session; None: a new one."""
        return AgentSession(self.connection, self._control_s, name)

    # ------------------------------------------------------------------ pause

    async def pause(
        self,
        mode: PauseMode = "keep",
        *,
        lora_name: str | None = None,
        hold_id: str | None = None,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> dict[str, Any]:
        """Pause by a hold, and return the server's report when it is quiesced. If the pause fails, the hold is released
        before the error is raised. lora_name: pause the requests of this adapter only. options: clear_cache, admission,
        on_timeout, ttl_s of /v1/pause.

        A thread renews the hold's ttl (ttl_s, by default hold_ttl_s) until :meth:`resume` or :meth:`close`. If this
        process dies, the ttl ends and the server runs again. A hold with ttl_s None does not end by itself."""
        options |= {"mode": mode, "timeout_s": timeout_s}
        hold = Hold(hold_id or new_hold_id(), lora_name)
        return await self._holds.pause(hold, options, timeout_s + self._control_s)

    async def resume(self, hold_id: str | None = None, *, lora_name: str | None = None) -> dict[str, Any]:
        """Release one hold: of the engine, or of the adapter ``lora_name``. hold_id None: every hold of this client, or
        of this client on that adapter. Raises HoldLost if a hold of this client had ended before, because its ttl was
        not renewed in time or an engine restarted."""
        if hold_id is None:
            report = await self._holds.resume_all(self._control_s, lora_name)
        else:
            report = await self._holds.resume(Hold(hold_id, lora_name), self._control_s)
        self._state.retry_now()
        return report

    @asynccontextmanager
    async def paused(
        self, mode: PauseMode = "keep", *, lora_name: str | None = None, timeout_s: float = 60.0, **options: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Pause the server (with lora_name: that adapter) inside the block, and resume it at its end, also after an
        exception or a cancellation.
        Raises HoldLost at the end if the hold had ended early. If the block raises, its exception gets the message of
        HoldLost as a note instead."""
        hold_id = new_hold_id()
        report = await self.pause(mode, lora_name=lora_name, hold_id=hold_id, timeout_s=timeout_s, **options)
        try:
            yield report
        except BaseException as error:
            with note_cleanup_failure(error):
                await self.resume(hold_id, lora_name=lora_name)
            raise
        await self.resume(hold_id, lora_name=lora_name)

    async def is_paused(self, *, lora_name: str | None = None) -> bool:
        """Return whether the server is quiesced; with lora_name, whether that adapter is."""
        scope = None if lora_name is None else {"lora_name": lora_name}
        return (await self.connection.call("GET", "/v1/is_paused", self._control_s, params=scope))["is_paused"]

    async def abort_all(self, *, lora_name: str | None = None) -> dict[str, Any]:
        """Abort all requests of all clients; with lora_name, all requests of that adapter. This client continues its
        own generations afterwards."""
        which = {"abort_all": True} if lora_name is None else {"lora_name": lora_name}
        return await self._post("abort_requests", **which)

    # ------------------------------------------------------------------ weights

    async def publish(
        self,
        state: Mapping[str, Any] | NamedTensors,
        version: str | int | None = None,
        *,
        partial: bool = False,
        delta: Literal["auto", "never"] = "auto",
        kv: Literal["keep", "recompute"] = "keep",
        via: Via = "auto",
        folder: str | None = None,
        compression: Literal["auto", "none", "zstd"] = "auto",
        chunk_mb: int = 256,
        deadline_s: float = 600.0,
        before_commit: Callable[[], Awaitable[Any]] | None = None,
        **options: Any,
    ) -> Publication:
        """Publish a state dict: first stage all tensors, then commit them. If staging fails, or if a hold of this
        client ended early (HoldLost), nothing is committed.

        state: Paddle, torch or numpy tensors by their name in the checkpoint; or an (async) iterable of (name, tensor)
        pairs, which is read part by part and is never in memory as a whole.
        partial: tensors that ``state`` lacks keep their value.
        delta: "auto" keeps a copy of the state in the dtype of the server, and sends the next one as its difference
        from this copy. A server that serves other weights than this copy, for example after a restart, is sent the
        whole; so it is if the difference is hardly smaller. "never" keeps no copy. A stream is always sent whole.
        via: the way to send tensors; "auto" takes shared memory if the server is on this host, else an upload; "folder"
        needs ``folder``, which the server can read. chunk_mb: size of a part. compression: of differences; "auto" takes
        zstd unless the server is on this host. before_commit: is awaited, within ``deadline_s``, when the server has
        all tensors; if it raises, nothing is committed. options: expected_version, lease_s of /v1/weights/begin.
        Raises WrongWeights if the server serves other weights after the commit.
        """
        sending = SendOptions(self.connection.is_local, via, folder, chunk_mb << 20, compression)
        begin = options | {"kv": kv, "partial": partial} | _label(version)
        return await self._publisher.publish(state, delta, sending, SessionOptions(begin, deadline_s, before_commit))

    async def update_weights(
        self, model_path: str, version: str | int | None = None, *, deadline_s: float = 600.0, **options: Any
    ) -> Publication:
        """Load a checkpoint folder, which the server can read. version None: the server makes a label from its
        weight_epoch. options: kv, partial, expected_version, lease_s."""
        return await self._publisher.publish_folder(
            str(model_path), SessionOptions(options | _label(version), deadline_s)
        )

    async def set_version(self, version: str | int) -> dict[str, Any]:
        """Give the served weights another version label. Nothing else changes."""
        return await self._post("update_weights", **_label(version))

    # ------------------------------------------------------------------ adapters

    async def load_adapter(
        self,
        lora_name: str,
        adapter: str | os.PathLike[str] | Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
        *,
        version: str | int | None = None,
        kv: Literal["keep", "recompute"] = "keep",
        via: MemoryVia = "auto",
        deadline_s: float = 600.0,
    ) -> Publication:
        """Load an adapter under a name, or replace the adapter of that name between two steps.

        adapter: a PEFT folder that the server can read, which may be deleted afterwards; or the tensors of such a
        folder by their names in it (``peft.get_peft_model_state_dict(model)``), with ``config``, the content of its
        adapter_config.json (``peft_config.to_dict()``). version: label; None: the server makes one from its
        adapter_epoch. kv, via: see :meth:`publish`.
        A server that refuses the adapter keeps the one that it has. If a hold of this client on the engine or on this
        adapter ended early, nothing is loaded (HoldLost)."""
        fields: dict[str, Any] = {"lora_name": lora_name, "kv": kv} | _label(version)
        async with adapter_call(adapter, config, fields, via, self.connection.is_local) as call:
            return await self._adapters.load(lora_name, call, deadline_s)

    async def unload_adapter(self, lora_name: str) -> dict[str, Any]:
        """Remove a name. Its running requests finish on the weights that they have. A generation that has to be
        continued after that ends with the tokens that it has (finish_reason "abort", stop_reason "adapter_unloaded"),
        also if another adapter was loaded under the name. Raises ModelNotFound if the server does not know the name."""
        return await self._adapters.unload(lora_name, self._control_s)

    # ------------------------------------------------------------------ memory and health

    async def sleep(self, *tags: str, **options: Any) -> dict[str, Any]:
        """Free memory. tags: "weight", "kv_cache", or both. options: mode, discard."""
        return await self._post("sleep", tags=list(tags), **options)

    async def wake(self, *tags: str) -> dict[str, Any]:
        """Allocate the memory of ``tags`` again; without tags, of everything that sleeps."""
        report = await self._post("wakeup", tags=list(tags))
        self._state.retry_now()
        return report

    async def reset(self, version: str | int | None = None) -> dict[str, Any]:
        """Abort all requests, drop anonymous holds and open weight sessions, unload all adapters, clear the KV cache,
        set the version."""
        self._adapters.forget_all()
        return await self._post("reset", **_label(version))

    async def health(self) -> dict[str, Any]:
        """Return {"boot_id", "stale"}. stale: why this client sends no requests before the next publication, or
        None."""
        await self._state.ask_engine(self._control_s)
        return {"boot_id": self._state.boot_id, "stale": self._state.stale}

    async def _post(self, route: str, **body: Any) -> dict[str, Any]:
        return await self.connection.call("POST", f"/v1/{route}", self._control_s, json=body)


def _label(version: str | int | None) -> dict[str, str]:
    return {} if version is None else {"version": str(version)}
