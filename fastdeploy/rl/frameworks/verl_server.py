"""The server handle that verl calls, and the publishing of verl's weights. Makes HTTP calls, and imports neither verl
nor Ray. The module ``verl`` beside this one makes a Ray actor of the handle, and passes in verl's class of a reply.

An aborted generation is returned with its tokens so far, and is not continued here. verl's client submits the prompt
and the tokens again while the stop reason is "aborted".
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastdeploy.core.errors import ContextLengthExceeded, FastDeployError, InvalidField
from fastdeploy.core.experts import RoutedExperts
from fastdeploy.core.sampling_params import NO_SEED
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.connection import Connection, one_address, repeat
from fastdeploy.rl.continuation import PartialRollout, RolloutRequest
from fastdeploy.rl.errors import RolloutFailed, first_of_group, is_busy, is_retryable
from fastdeploy.rl.holds import Hold, Holds
from fastdeploy.rl.publish import Publication
from fastdeploy.rl.rollout import Rollout
from fastdeploy.rl.server_state import BACKOFF_S
from fastdeploy.rl.state_transfer import NamedTensors, each_item

CONTROL_S = 120.0
SILENCE_S = 60.0
BUSY_S = 120.0  # time for which a request is sent again to a server that takes none
DRAIN_S = 600.0
# Tags of sleep and wake_up: verl's names, and ours.
TAGS = {"weights": "weight", "weight": "weight", "kv_cache": "kv_cache"}
STOP_REASONS = {"abort": "aborted", "stop": "completed", "length": "completed"}


@dataclass(frozen=True)
class Limits:
    """Settings of verl's rollout config; lengths in tokens. sleeps: sleep and wake_up have an effect. frees_kv:
    release_kv_cache and resume_kv_cache have an effect. seed: seed of requests without one (full_determinism); None: a
    random seed for each. logprobs_mode: as our server spells it. routed_experts: replies tell which experts computed
    each token (enable_rollout_routing_replay)."""

    prompt_length: int
    response_length: int
    max_model_len: int
    ignore_eos: bool = False
    sleeps: bool = True
    frees_kv: bool = True
    seed: int | None = None
    logprobs_mode: str = "processed"
    routed_experts: bool = False

    def max_tokens(self, asked: int | None, prompt_tokens: int) -> int:
        """Return a request's limit: ``asked``, else the rest of the response length; never more than the context
        holds."""
        left = self.max_model_len - prompt_tokens
        if left < 1:
            wanted = f"a prompt of {prompt_tokens} tokens, and room for at least 1 of output"
            raise ContextLengthExceeded("prompt_ids", self.max_model_len, wanted)
        if asked is None:
            asked = min(self.response_length, self.prompt_length + self.response_length - prompt_tokens)
        return max(1, min(asked, left))


class Address(NamedTuple):
    """Where a rollout replica finds its server. url None: it starts one. is_first: no rollout replica of a lower rank
    has this address, so this one lets the server sleep and wake up, and publishes to it. A second call would be refused
    while the first one runs."""

    url: str | None
    control_url: str | None
    is_first: bool


def address_of(replica_rank: int, options: Mapping[str, Any]) -> Address:
    """Return the address of a rollout replica. options: of engine_kwargs, which may have ``urls`` and ``control_urls``.
    Rollout replicas share addresses if these are fewer. Raises InvalidField."""
    for field in ("urls", "control_urls"):
        if isinstance(options.get(field), str):
            raise InvalidField(field, f"expected a list of addresses, got {options[field]!r}")
    urls, control_urls = options.get("urls") or (), options.get("control_urls") or ()
    if control_urls and len(control_urls) != len(urls):
        raise InvalidField("control_urls", f"expected one for each of {len(urls)} urls, got {len(control_urls)}")
    if not urls:
        return Address(None, None, True)
    urls = [one_address("urls", url) for url in urls]
    index = replica_rank % len(urls)
    is_first = urls.index(urls[index]) == replica_rank
    return Address(urls[index], control_urls[index] if control_urls else None, is_first)


class VerlServer:
    """The server handle. output: makes a reply from token_ids, log_probs, routed_experts (see ``_of_all_layers``),
    stop_reason, num_preempted, extra_fields. access: api_key, control_key and control_url of Connection."""

    def __init__(self, url: str, limits: Limits, output: Callable[..., Any], **access: Any):
        self._limits = limits
        self._output = output
        self._connection = Connection(url, **access)
        self._holds = Holds(self._connection)
        prefix = f"verl-{uuid.uuid4().hex}"
        self._admission_holds = {admission: Hold(f"{prefix}-{admission}") for admission in ("hold", "reject")}
        self._drain_hold = Hold(f"{prefix}-drain")
        self._rejecting = False

    async def close(self) -> None:
        """Close the connections. Standing holds end by their ttl."""
        await self._holds.close()
        await self._connection.close()

    # ------------------------------------------------------------------ generation

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> Any:
        """Generate until the end or an abort.

        A lost connection counts as an abort, as soon as the server answers again. A server that takes no requests is
        asked again after its Retry-After; after BUSY_S the request counts as aborted without a token.
        Raises Unreachable or EngineDead if the server does not answer again, RolloutFailed if the logits were not
        finite. extra_fields of the reply: global_steps, min_global_steps and max_global_steps (steps of the weights
        that sampled the tokens), num_cached_tokens."""
        for field, value in (("image_data", image_data), ("video_data", video_data), ("audio_data", audio_data)):
            if value:
                raise InvalidField(field, "not supported by this server: token ids only")
        params = self._params(sampling_params, len(prompt_ids), request_id) | {"priority": priority}
        choice = PartialRollout(RolloutRequest(prompt_ids, params, request_id=request_id))
        choice.begin_attempt()
        try:
            await self._stream_when_admitted(choice)
        except FastDeployError as error:
            if choice.finish_reason is None:
                if not is_retryable(error):
                    raise
                if not is_busy(error):
                    await self._call("GET", "/health")  # waits until the server answers again
                choice.end_attempt_early()
        if choice.finish_reason == "error":
            raise RolloutFailed(f"the answer ended with an error: {choice.stop_reason}", [choice.rollout()])
        return await self._reply(choice.rollout())

    async def _stream_when_admitted(self, choice: PartialRollout) -> None:
        """Send the request until the server takes it. Raises the refusal after BUSY_S, or after one wait if
        :meth:`abort_all_requests` asked for rejections: verl then uses another server."""
        now = asyncio.get_running_loop().time
        until = now() + BUSY_S
        while True:
            try:
                await self._stream(choice)
                return
            except FastDeployError as error:
                if not is_busy(error):
                    raise
                wait = max(error.detail.get("retry_after", 0.0), BACKOFF_S)
                await asyncio.sleep(max(min(wait, until - now()), 0.0))
                if self._rejecting or now() >= until:
                    raise

    async def _stream(self, choice: PartialRollout) -> None:
        """Add the output of the server's stream to ``choice``."""
        body = choice.request.body([choice])
        async with self._connection.stream("/v1/completions", body, SILENCE_S) as events:
            async for event in events:
                for item in (event or {}).get("choices", ()):
                    choice.add_output(item, event.get("system_fingerprint"))
                if (event or {}).get("usage"):
                    choice.add_usage(event["usage"])

    def _params(self, given: Mapping[str, Any], prompt_tokens: int, request_id: str) -> dict[str, Any]:
        params = {name: value for name, value in given.items() if name not in ("max_new_tokens", "logprobs")}
        asked = given.get("max_tokens", given.get("max_new_tokens"))
        params["max_tokens"] = self._limits.max_tokens(asked, prompt_tokens)
        params["logprobs"] = 0 if given.get("logprobs") else None
        params.setdefault("ignore_eos", self._limits.ignore_eos)
        params.setdefault("logprobs_mode", self._limits.logprobs_mode)
        params["routed_experts"] = self._limits.routed_experts
        if self._limits.seed is not None and params.get("seed", NO_SEED) == NO_SEED:
            # With one seed for all requests, equal prompts would get equal answers. The ids of verl's requests differ,
            # and are the same in each run.
            digest = hashlib.sha256(f"{self._limits.seed}/{request_id}".encode()).digest()
            params["seed"] = int.from_bytes(digest[:8]) >> 1
        return params

    async def _reply(self, rollout: Rollout) -> Any:
        versions = [span.version for span in rollout.spans] or [(await self._call("GET", "/v1/weights"))["version"]]
        steps = [int(version) for version in versions if version.isdigit()]  # other versions are no step
        fields: dict[str, Any] = {
            # verl takes this step for the age of the whole rollout, so it is that of the oldest token.
            "global_steps": min(steps, default=None),
            "min_global_steps": min(steps, default=None),
            "max_global_steps": max(steps, default=None),
            "num_cached_tokens": rollout.cached_tokens,
        }
        if rollout.prompt_logprobs is not None:
            fields["prompt_ids"], fields["prompt_logprobs"] = rollout.prompt_ids, rollout.prompt_logprobs
        return self._output(
            token_ids=rollout.token_ids,
            log_probs=rollout.logprobs,
            routed_experts=None if rollout.routed_experts is None else _of_all_layers(rollout.routed_experts),
            stop_reason=STOP_REASONS.get(rollout.finish_reason, rollout.finish_reason),
            num_preempted=rollout.num_preempted,
            extra_fields=fields,
        )

    # ------------------------------------------------------------------ control

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Abort all requests and admit no more until :meth:`resume_generation`; return the aborted ids. New requests
        wait, or are answered as aborted if ``reject_request``."""
        admission, other = ("reject", "hold") if reject_request else ("hold", "reject")
        options = {"mode": "abort", "clear_cache": reset_prefix_cache, "admission": admission}
        report = await self._holds.pause(self._admission_holds[admission], options, CONTROL_S)
        self._rejecting = reject_request
        # Only one of the two holds may stand: with both, the server would reject requests.
        await self._holds.resume(self._admission_holds[other], CONTROL_S)
        ids = report["aborted_ids"]
        return {"aborted_count": len(ids), "request_ids": ids}

    async def resume_generation(self) -> None:
        """Admit requests again. Raises HoldLost if the hold had ended before, as after a restart of the engine."""
        self._rejecting = False
        await self._holds.resume_all(CONTROL_S)

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        result = await self._call("POST", "/v1/abort_requests", json={"req_ids": [request_id]})
        if not result["aborted"]:
            return {"aborted": False, "error": f"Request {request_id} not found"}
        if reset_prefix_cache:
            await self.clear_kv_cache()
        return {"aborted": True, "request_id": request_id}

    async def set_global_steps(self, global_steps: int) -> None:
        """Make the trainer's step the version of the served weights. Past tokens keep their version, and nothing is
        aborted."""
        await self._call("POST", "/v1/update_weights", json={"version": str(global_steps)})

    async def clear_kv_cache(self) -> None:
        await self._call("POST", "/reset_prefix_cache", json={"reset_running_requests": False})

    async def wait_for_requests_to_drain(self) -> None:
        """Wait until all running requests are finished, then admit requests again. PauseTimeout: not in DRAIN_S."""
        drain = {"mode": "wait", "clear_cache": False, "timeout_s": DRAIN_S, "on_timeout": "cancel"}
        await self._holds.pause(self._drain_hold, drain, DRAIN_S + CONTROL_S)
        await self._holds.resume(self._drain_hold, CONTROL_S)

    # ------------------------------------------------------------------ memory

    async def sleep(self) -> None:
        if self._limits.sleeps:
            await self._set_asleep({"weight", "kv_cache"})

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self._limits.sleeps:
            woken = set(TAGS.values()) if tags is None else {_tag(tag) for tag in tags}
            await self._set_asleep(await self._asleep() - woken)

    async def release_kv_cache(self) -> None:
        """Free the memory of the KV cache, for a weight sync."""
        if self._limits.frees_kv:
            await self._set_asleep(await self._asleep() | {"kv_cache"})

    async def resume_kv_cache(self) -> None:
        if self._limits.frees_kv:
            await self._set_asleep(await self._asleep() - {"kv_cache"})

    async def _asleep(self) -> set[str]:
        return set((await self._call("GET", "/v1/weights"))["asleep"])

    async def _set_asleep(self, wanted: set[str]) -> None:
        """Make exactly the tags in ``wanted`` sleep. The server refuses to put to sleep a tag that sleeps, and to wake
        a tag that is awake, so such tags are left out."""
        now = await self._asleep()
        if wanted - now:
            await self._call("POST", "/v1/sleep", retry=False, json={"tags": sorted(wanted - now)})
        if now - wanted:
            await self._call("POST", "/v1/wakeup", retry=False, json={"tags": sorted(now - wanted)})

    async def _call(self, method: str, path: str, retry: bool = True, **kwargs: Any) -> dict[str, Any]:
        """Return the result of a route. retry: repeat the call for CONTROL_S on a server that cannot be reached."""

        async def call() -> dict[str, Any]:
            return await self._connection.call(method, path, CONTROL_S, **kwargs)

        return await repeat(call, CONTROL_S) if retry else await call()


def _tag(tag: str) -> str:
    if tag not in TAGS:
        raise InvalidField("tags", f"expected {', '.join(TAGS)}, got {tag!r}")
    return TAGS[tag]


async def publish_step(
    clients: Sequence[RolloutClient], weights: NamedTensors, global_steps: int | None, **options: Any
) -> list[Publication]:
    """Publish full tensors to each address as version ``global_steps``; None: as the version that serves there now.
    weights: pairs of name and tensor, which are read once. options: of RolloutClient.publish. No address commits before
    all addresses have all tensors. If one fails earlier, none commits; if a commit fails, others may have committed."""
    staged = asyncio.Barrier(len(clients))
    queues: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in clients]

    async def read() -> None:
        async for pair in each_item(weights):
            for queue in queues:
                queue.put_nowait(pair)
            for queue in queues:
                await queue.join()  # all have copied the tensor: the next one may come in the same buffer
        for queue in queues:
            queue.put_nowait(None)

    async def pairs(queue: asyncio.Queue[Any]) -> AsyncIterator[tuple[str, Any]]:
        while (pair := await queue.get()) is not None:
            yield pair
            queue.task_done()

    async def publish(client: RolloutClient, queue: asyncio.Queue[Any]) -> Publication:
        version: str | int | None = global_steps
        if version is None:
            version = (await client.connection.call("GET", "/v1/weights", CONTROL_S))["version"]
        return await client.publish(pairs(queue), version, before_commit=staged.wait, **options)

    with first_of_group():
        async with asyncio.TaskGroup() as group:
            published = [group.create_task(publish(*each)) for each in zip(clients, queues, strict=True)]
            group.create_task(read())
    return [task.result() for task in published]


async def peek_first(weights: NamedTensors) -> tuple[bool, AsyncIterator[tuple[str, Any]]]:
    """Return whether ``weights`` has a tensor, and an iterator of all tensors."""
    rest = each_item(weights)
    first = await anext(rest, None)

    async def all_pairs() -> AsyncIterator[tuple[str, Any]]:
        if first is not None:
            yield first
            async for pair in rest:
                yield pair

    return first is not None, all_pairs()


def _of_all_layers(routed: RoutedExperts) -> np.ndarray:
    """Return rows as verl's own backends do: int32 [rows, layers of the model, top_k], zeros for dense layers."""
    rows = np.zeros((routed.num_rows, routed.info.num_layers, routed.info.top_k), np.int32)
    rows[:, routed.info.layers] = routed.array()
    return rows
