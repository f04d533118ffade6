"""The clients of a soak: rollouts of a RolloutClient, many at once, and the reading back of broken attempts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
import numpy as np

from acceptance.lib.ledger import Ledger, Witness
from acceptance.lib.soak import plan
from fastdeploy.bench.client import FAILURES, Client, Reply
from fastdeploy.bench.workload import Clients
from fastdeploy.core.errors import FastDeployError
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.rollout import Rollout

RETAIN_S = 300.0  # longer than any wait between the end of an attempt and its reading back
READ_BACK_S = 600.0
PATIENCE = 1000  # failures in a row of one rollout: a server that restarts is busy for a while
REFUSED = 400


@dataclass
class Attempt:
    """One HTTP request for a rollout. start: number of output tokens that the client had before. status: of the reply;
    None: the connection broke before it came."""

    request_id: str
    body: dict[str, Any]
    start: int
    status: int | None = None


class Load:
    """Keeps ``in_flight`` rollouts running while ``clients`` go on. ended: rollouts of the base weights that have ended
    since somebody emptied it."""

    def __init__(self, url: str, seed: int, in_flight: int, ledger: Ledger):
        self._seed, self._ledger = seed, ledger
        self._client = RolloutClient(url, timeout_s=3600.0, max_failures=PATIENCE, control_s=300.0)
        # The ids and bodies of all attempts are needed to read their results back.
        self._client.connection.http.event_hooks = {"request": [self._on_request], "response": [self._on_response]}
        self._wire = Client(url)
        self._attempts: dict[str, list[Attempt]] = defaultdict(list)
        self._prompt_tokens: dict[str, int] = {}
        self._numbers = count()
        self.ended: list[Witness] = []
        self.clients = Clients(in_flight, self._one)

    async def close(self) -> None:
        await self.clients.close()
        await self._client.close()

    def open_rollouts(self) -> list[str]:
        """Return the last attempt of each rollout that runs, for a report of what hangs."""
        return [f"{a[-1].request_id} (status {a[-1].status})" for a in self._attempts.values() if a]

    async def abort_one(self, rng: np.random.Generator) -> None:
        """Abort one of the running rollouts by the id of its present attempt. Its client goes on by itself."""
        if running := [attempts[-1].request_id for attempts in self._attempts.values() if attempts]:
            await self._abort([running[int(rng.integers(len(running)))]])

    async def with_adapter(self, lora_name: str, folder: str, prompts: list[plan.Prompt]) -> None:
        """Load an adapter, make rollouts with it, and unload it."""
        await self._client.load_adapter(lora_name, folder)
        await asyncio.gather(*(self._rollout(f"adapter-{prompt.number}", prompt, lora_name) for prompt in prompts))
        await self._client.unload_adapter(lora_name)

    async def _one(self, client: int) -> None:
        number = next(self._numbers)
        await self._rollout(f"rollout-{number}", plan.prompt(self._seed, number), None)

    async def _rollout(self, name: str, prompt: plan.Prompt, lora_name: str | None) -> None:
        self._ledger.begin(name)
        try:
            self._prompt_tokens[name] = len(prompt.ids)
            began = time.monotonic()
            params = prompt.params | {"retain_s": RETAIN_S}
            rollout = await self._client.generate(prompt.ids, params, request_id=name, lora_name=lora_name)
            ended = time.monotonic()
            await self._read_back(self._attempts[name], rollout)
            self._accept(name, rollout, prompt.params["max_tokens"])
            if lora_name is None:
                self.ended.append(Witness(name, rollout, began, ended, prompt.params["temperature"] == 0))
        except (FastDeployError, httpx.TransportError, TimeoutError) as error:
            self._ledger.problem(f"{name}: {type(error).__name__}: {error}")
        finally:
            self._attempts.pop(name, None)
            self._prompt_tokens.pop(name, None)

    def _accept(self, name: str, rollout: Rollout, want: int) -> None:
        """Record the final output of a rollout that must have ``want`` tokens."""
        tokens, logprobs = len(rollout.token_ids), rollout.logprobs
        self._ledger.accept(name, rollout.spans, tokens)
        if rollout.finish_reason != "length" or tokens != want:
            self._ledger.problem(f"{name}: {tokens} tokens and {rollout.finish_reason!r}, expected {want} and 'length'")
        if logprobs is None or len(logprobs) != tokens:
            self._ledger.problem(f"{name}: not one logprob for each of {tokens} tokens")

    # ------------------------------------------------------------------ attempts

    async def _on_request(self, request: httpx.Request) -> None:
        if request.url.path == "/v1/completions":
            body = json.loads(request.content)
            name = body["request_id"].partition("~")[0]
            start = len(body["prompt"]) - self._prompt_tokens[name]
            self._attempts[name].append(Attempt(body["request_id"], body, start))

    async def _on_response(self, response: httpx.Response) -> None:
        if response.request.url.path == "/v1/completions":
            body = json.loads(response.request.content)
            for attempt in self._attempts[body["request_id"].partition("~")[0]]:
                if attempt.request_id == body["request_id"]:
                    attempt.status = response.status_code

    async def _read_back(self, attempts: list[Attempt], rollout: Rollout) -> None:
        """Compare each attempt but the last one, which gave the end, with what the engine has kept of it."""
        earlier = [a for a in attempts[:-1] if a.status is None or a.status < REFUSED]
        if not earlier:
            return
        await self._abort([attempt.request_id for attempt in earlier])
        ends = {a.request_id: b.start for a, b in zip(attempts[:-1], attempts[1:], strict=True)}
        for attempt in earlier:
            received = rollout.token_ids[attempt.start : ends[attempt.request_id]]
            reply = await self._until_answered("/v1/completions", attempt.body | {"stream": False})
            if reply.status == 410:  # its engine was killed
                self._ledger.lost_results += 1
            elif reply.status != 200:
                self._ledger.problem(f"{attempt.request_id}: read back: {reply.status} {str(reply.body)[:200]}")
            else:
                kept = reply.body["choices"][0]["token_ids"]
                self._ledger.read_back(attempt.request_id, reply.body["system_fingerprint"], received, kept)

    async def _abort(self, request_ids: list[str]) -> None:
        await self._until_answered("/v1/abort_requests", {"req_ids": request_ids})

    async def _until_answered(self, path: str, body: dict[str, Any]) -> Reply:
        """Make a call until a live engine answers it."""
        async with asyncio.timeout(READ_BACK_S):
            while True:
                with contextlib.suppress(*FAILURES):
                    reply = await self._wire.call("POST", path, body)
                    if reply.status < 500 and reply.status != 429:
                        return reply
                await asyncio.sleep(0.2)
