"""What verl calls on a rollout server, over HTTP to one of ours. Imports neither verl nor Ray: fastdeploy.rl.verl makes
Ray actors of it, and gives it verl's own class of a reply.

verl resubmits by itself: its client sends prompt + tokens so far for as long as the stop reason is "aborted", so here
an abort is answered with what there is, and not gone on from.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from fastdeploy.errors import FastDeployError, InvalidField
from fastdeploy.rl.errors import RolloutFailed
from fastdeploy.rl.fleet import fan_out, require_all
from fastdeploy.rl.generate import may_pass
from fastdeploy.rl.replica import Replica
from fastdeploy.rl.resume import Partial, Request
from fastdeploy.rl.rollout import Rollout
from fastdeploy.rl.routing import BUSY

CONTROL_S = 120.0
SILENCE_S = 60.0
# verl's names of what sleeps, and ours.
TAGS = {"weights": "weight", "weight": "weight", "kv_cache": "kv_cache"}
STOP_REASONS = {"abort": "aborted", "stop": "completed", "length": "completed"}


@dataclass(frozen=True)
class Limits:
    """Of verl's rollout config; lengths in tokens. sleeps: whether sleep and wake_up do anything; frees_kv: the same of
    release_kv_cache and resume_kv_cache. seed: of every request that names none (full_determinism); None = a random one
    each. logprobs_mode: as our server spells it."""

    prompt_length: int
    response_length: int
    max_model_len: int
    ignore_eos: bool = False
    sleeps: bool = True
    frees_kv: bool = True
    seed: int | None = None
    logprobs_mode: str = "processed"

    def max_tokens(self, asked: int | None, prompt_tokens: int) -> int:
        """What a request may make at most: as asked, else what is left of the response, within the context."""
        left = self.max_model_len - prompt_tokens
        if left < 1:
            raise InvalidField(
                "prompt_ids", f"{prompt_tokens} tokens leave no room in a context of {self.max_model_len}"
            )
        if asked is None:
            asked = min(self.response_length, self.prompt_length + self.response_length - prompt_tokens)
        return max(1, min(asked, left))


class VerlServer:
    """The server handle. ``output`` makes a reply of token_ids, log_probs, stop_reason, num_preempted, extra_fields."""

    def __init__(self, url: str, limits: Limits, output: Callable[..., Any]):
        self._limits = limits
        self._output = output
        self._server = Replica(url, httpx.AsyncClient(limits=httpx.Limits(), trust_env=False))
        own = f"verl-{uuid.uuid4().hex}"
        self._holds = {admission: f"{own}-{admission}" for admission in ("hold", "reject")}
        self._drain_hold = f"{own}-drain"
        self._times_asked: Counter[int] = Counter()  # by hash of the prompt, where all requests share one seed

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
        """Tokens, until their end or an abort. A server that is lost on the way counts as an abort once it is back.
        FleetError if it does not come back, RolloutFailed if the model's logits were not finite. extra_fields:
        global_steps, min_global_steps and max_global_steps of the weights that made the tokens, and num_cached_tokens.
        """
        for field, value in (("image_data", image_data), ("video_data", video_data), ("audio_data", audio_data)):
            if value:
                raise InvalidField(field, "not supported by this server: token ids only")
        params = self._params(sampling_params, prompt_ids) | {"priority": priority}
        choice = Partial(Request(prompt_ids, params, request_id=request_id))
        choice.begin(self._server.url)
        usage: dict[str, Any] = {}
        try:
            body = choice.request.body([choice], 0) | {"stream_options": {"include_usage": True}}
            async with self._server.stream("/v1/completions", body, SILENCE_S) as events:
                async for event in events:
                    usage = (event or {}).get("usage") or usage
                    for item in (event or {}).get("choices", ()):
                        choice.take(item, event.get("system_fingerprint"))
        except FastDeployError as error:
            if choice.finish_reason is None:
                if not may_pass(error):
                    raise
                if error.code not in BUSY:
                    await self._back()
                choice.cut_off()
        if choice.finish_reason == "error":
            raise RolloutFailed(f"the answer ended with an error: {choice.stop_reason}", [choice.rollout()])
        return await self._reply(choice.rollout(), usage)

    def _params(self, given: Mapping[str, Any], prompt_ids: Sequence[int]) -> dict[str, Any]:
        params = {name: value for name, value in given.items() if name not in ("max_new_tokens", "logprobs")}
        asked = given.get("max_tokens", given.get("max_new_tokens"))
        params["max_tokens"] = self._limits.max_tokens(asked, len(prompt_ids))
        params["logprobs"] = 0 if given.get("logprobs") else None
        params.setdefault("ignore_eos", self._limits.ignore_eos)
        params.setdefault("logprobs_mode", self._limits.logprobs_mode)
        if self._limits.seed is not None and params.get("seed") is None:
            params["seed"], params["first_choice"] = self._limits.seed, self._number(prompt_ids)
        return params

    def _number(self, prompt_ids: Sequence[int]) -> int:
        """How often this prompt came before: its choice number, so that a group of equal prompts, which verl sends one
        by one, draws apart under one seed, and the same in every run."""
        key = hash(tuple(prompt_ids))
        self._times_asked[key] += 1
        return self._times_asked[key] - 1

    async def _reply(self, rollout: Rollout, usage: Mapping[str, Any]) -> Any:
        labels = [span.version for span in rollout.spans] or [(await self._call("GET", "/v1/weights"))["version"]]
        steps = [step for label in labels if (step := _step(label)) is not None]
        fields: dict[str, Any] = {
            # One number can only be a bound: that of the oldest token, since it decides what is too old.
            "global_steps": min(steps, default=None),
            "min_global_steps": min(steps, default=None),
            "max_global_steps": max(steps, default=None),
            "num_cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        }
        if rollout.prompt_logprobs is not None:
            fields["prompt_ids"], fields["prompt_logprobs"] = rollout.prompt_ids, rollout.prompt_logprobs
        return self._output(
            token_ids=rollout.token_ids,
            log_probs=rollout.logprobs,
            stop_reason=STOP_REASONS.get(rollout.finish_reason, rollout.finish_reason),
            num_preempted=rollout.num_preempted,
            extra_fields=fields,
        )

    async def _back(self) -> None:
        """Wait until the server answers again."""
        require_all("the server is gone", await fan_out([self._server], _health, CONTROL_S, retry=True))

    # ------------------------------------------------------------------ control

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """End what runs and close the door until :meth:`resume_generation`. Requests that come meanwhile wait, or with
        ``reject_request`` are answered as aborted."""
        admission = "reject" if reject_request else "hold"
        body = {"mode": "abort", "clear_cache": reset_prefix_cache, "admission": admission}
        report = await self._call("POST", "/v1/pause", json=body | {"hold_id": self._holds[admission]})
        # Only one of the two stands: the stronger admission would win, and go on doing so.
        await self._release("hold" if reject_request else "reject")
        return {"aborted_count": report["counts"]["aborted"], "request_ids": report["forced_ids"]}

    async def resume_generation(self) -> None:
        for admission in self._holds:
            await self._release(admission)

    async def _release(self, admission: str) -> None:
        await self._call("POST", "/v1/resume", json={"hold_id": self._holds[admission]})

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        result = await self._call("POST", "/v1/abort_requests", json={"req_ids": [request_id]})
        if not result["aborted"]:
            return {"aborted": False, "error": f"Request {request_id} not found"}
        if reset_prefix_cache:
            await self.clear_kv_cache()
        return {"aborted": True, "request_id": request_id}

    async def set_global_steps(self, global_steps: int) -> None:
        """Label the weights that serve with the trainer's step. Nothing is aborted and no past token is relabelled."""
        await self._call("POST", "/v1/update_weights", json={"version": str(global_steps)})

    async def clear_kv_cache(self) -> None:
        await self._call("POST", "/reset_prefix_cache", json={"reset_running_requests": False})

    async def wait_for_requests_to_drain(self) -> None:
        """Return when everything that runs has come to its end; the door is open again afterwards."""
        drain = {"mode": "wait", "clear_cache": False, "hold_id": self._drain_hold}
        await self._call("POST", "/v1/pause", json=drain)
        await self._call("POST", "/v1/resume", json={"hold_id": self._drain_hold})

    # ------------------------------------------------------------------ memory

    async def sleep(self) -> None:
        if self._limits.sleeps:
            await self._set_asleep({"weight", "kv_cache"})

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self._limits.sleeps:
            woken = set(TAGS.values()) if tags is None else {_tag(tag) for tag in tags}
            await self._set_asleep(await self._asleep() - woken)

    async def release_kv_cache(self) -> None:
        """Give the KV's memory back while weights are synced; the weights stay where they are."""
        if self._limits.frees_kv:
            await self._set_asleep(await self._asleep() | {"kv_cache"})

    async def resume_kv_cache(self) -> None:
        if self._limits.frees_kv:
            await self._set_asleep(await self._asleep() - {"kv_cache"})

    async def _asleep(self) -> set[str]:
        return set((await self._call("GET", "/v1/weights"))["asleep"])

    async def _set_asleep(self, wanted: set[str]) -> None:
        """verl sleeps and wakes what may be so already; the server refuses that."""
        now = await self._asleep()
        if wanted - now:
            await self._call("POST", "/v1/sleep", json={"tags": sorted(wanted - now)})
        if now - wanted:
            await self._call("POST", "/v1/wakeup", json={"tags": sorted(now - wanted)})

    async def _call(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        return await self._server.call(method, path, CONTROL_S, **kwargs)


async def _health(server: Replica) -> dict[str, Any]:
    return await server.call("GET", "/health", 5.0)


def _tag(tag: str) -> str:
    if tag not in TAGS:
        raise InvalidField("tags", f"expected {', '.join(TAGS)}, got {tag!r}")
    return TAGS[tag]


def _step(version: str) -> int | None:
    """The trainer's step that a label names; None for a label that is none."""
    return int(version) if version.isdigit() else None
