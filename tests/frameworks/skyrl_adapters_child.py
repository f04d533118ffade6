"""Many tenants with SkyRL's own client: syncs of one adapter while others generate. Run by test_skyrl_adapters.py in
the environment of the frameworks; prints one line of JSON.

Four cases are those that SkyRL tested on vLLM (its pull request 1657). One has two controllers. Before them comes the
first sync of a tenant, whose adapter was never loaded. All are run in each way in which a trainer can hold back the
requests of the adapter that it syncs:

plain    SkyRL 0.4's pause_generation: the whole engine freezes
native   this server's pause of one adapter
abort    that of pull request 1657: the requests of the adapter are aborted, and the client sends them again later

usage: skyrl_adapters_child.py URL A1 A2 B1 B2 C      (folders of adapters: two policies of tenants A and B, and C's)
"""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from collections.abc import Awaitable, Callable
from typing import Any

import typing_extensions

if sys.version_info < (3, 12):
    # SkyRL 0.4 requires Python 3.12, only since pydantic accepts typing's TypedDict there.
    typing.TypedDict = typing_extensions.TypedDict

import httpx
from in_time import get, in_time, tokens_made, unless_done
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

TOKENS = 1500
SAMPLING = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
PROMPTS = [[40 + i for i in range(20)] + [100 + k] for k in range(4)]
WAYS = ("plain", "native", "abort")


class Tenant:
    """A tenant: its adapter ``name``, and a client of its own. way: how its requests are held back in a sync."""

    def __init__(self, url: str, name: str, way: str):
        self.name = name
        self._url = url
        self._way = way
        self._client = RemoteInferenceClient(
            proxy_url=url, server_urls=[url], data_parallel_size=1, uses_lora_weight_sync=True
        )
        self._gate = asyncio.Event()
        self._gate.set()
        self.aborts = 0

    async def load(self, folder: str) -> int:
        """Load the adapter, and return its lora_int_id."""
        (reply,) = (await self._client.load_lora_adapter(self.name, folder)).values()
        return json.loads(reply["body"])["lora_int_id"]

    async def generate(self, prompt: list[int], tokens: int = TOKENS) -> dict[str, Any]:
        """Generate ``tokens`` tokens. After an abort, wait for the resume and request the rest, as SkyRL's
        sample_with_retry did."""
        ids: list[int] = []
        logprobs: list[float] = []
        stop = "abort"
        while stop == "abort":
            await self._gate.wait()
            batch = {
                "prompt_token_ids": [prompt + ids],
                "sampling_params": SAMPLING | {"max_tokens": tokens - len(ids)},
            }
            out = await self._client.generate(batch, model=self.name)
            ids += out["response_ids"][0]
            logprobs += out["response_logprobs"][0] or []  # None for an abort before the first token
            stop = out["stop_reasons"][0]
            self.aborts += stop == "abort"
        return {"ids": ids, "logprobs": len(logprobs), "stop": stop}

    async def pause(self) -> int:
        """Hold back the requests, and return how many of them had not ended."""
        if self._way == "abort":
            self._gate.clear()
            replies = await self._client._call_all_servers(
                "/skyrl/v1/abort_lora_requests", json={"lora_name": self.name}
            )
            return sum(reply["body"]["count"] for reply in replies.values())
        if self._way == "plain":
            await self._client.pause_generation()
        else:
            await post(self._url, "/v1/pause", lora_name=self.name, mode="keep")
        return (await requests(self._url)).get(self.name, 0)

    async def resume(self) -> None:
        if self._way == "plain":
            await self._client.resume_generation()
        elif self._way == "native":
            await post(self._url, "/v1/resume", lora_name=self.name)
        else:
            self._gate.set()

    async def close(self, unload: bool = True) -> None:
        if unload:
            await self._client.unload_lora_adapter(self.name)
        await self._client.aclose()


class Cases:
    def __init__(self, url: str, way: str, folders: dict[str, str]):
        self._url = url
        self._way = way
        self._folders = folders

    async def run(self) -> dict[str, Any]:
        results: dict[str, Any] = {"first_sync": await asyncio.wait_for(self.first_sync(), 300)}
        for case in (self.paused, self.in_flight, self.swap, self.whole_engine, self.two_controllers):
            a, b, c = (Tenant(self._url, name, self._way) for name in "ABC")
            await a.load(self._folders["A1"])
            await b.load(self._folders["B1"])
            await c.load(self._folders["C"])
            results[case.__name__] = await asyncio.wait_for(case(a, b, c), 300)
            await asyncio.gather(a.close(), b.close(), c.close())
        return results

    def start(self, tenant: Tenant) -> list[asyncio.Task]:
        tenant.aborts = 0
        return [asyncio.create_task(tenant.generate(prompt)) for prompt in PROMPTS]

    async def caught(
        self,
        pause: Callable[[], Awaitable[bool]],
        resume: Callable[[], Awaitable[Any]],
        *tenants: Tenant,
    ) -> list[list[asyncio.Task]]:
        """Start the requests of ``tenants``, pause, and return the tasks. Start again if ``pause`` says that some had
        ended before."""

        async def attempt() -> list[list[asyncio.Task]] | None:
            running = [self.start(tenant) for tenant in tenants]
            tasks = [task for of_one in running for task in of_one]
            if await unless_done(tasks, lambda: self._all_run(*tenants)):
                if await pause():
                    return running
                await resume()
            await asyncio.gather(*tasks)
            return None

        return await in_time(attempt)

    async def _all_run(self, *tenants: Tenant) -> bool:
        """Return whether the engine has all requests of ``tenants``."""
        counts = await requests(self._url)
        return all(counts[tenant.name] == len(PROMPTS) for tenant in tenants)

    async def first_sync(self) -> dict[str, Any]:
        """A new tenant holds back its requests, of which there are none, and loads its first policy. This server's own
        pause needs an adapter, so a trainer that uses it loads without a pause."""
        new = Tenant(self._url, "new", self._way)
        pauses = self._way != "native"
        held = await new.pause() if pauses else 0
        await new.load(self._folders["A1"])
        if pauses:
            await new.resume()
        answer = await new.generate(PROMPTS[0])
        await new.close()
        return {"held": held, "answer": answer}

    async def paused(self, a: Tenant, b: Tenant, c: Tenant) -> dict[str, Any]:
        """While A is paused, B's new requests complete, and A's do not begin."""
        await a.pause()
        waiting = self.start(a)
        state = await paused(self._url)
        served = [await b.generate(PROMPTS[0], 100)] if self._way != "plain" else []
        early = sum(task.done() for task in waiting)
        await a.resume()
        return {"state": state, "served": served, "early": early, "after": await asyncio.gather(*waiting)}

    async def in_flight(self, a: Tenant, b: Tenant, c: Tenant) -> dict[str, Any]:
        """With 4 + 4 in flight, B's complete while A is paused; then A's complete."""

        async def pause() -> bool:
            return await a.pause() == len(PROMPTS) and await self._all_run(b)

        ours, theirs = await self.caught(pause, a.resume, a, b)
        finished = [await task for task in theirs] if self._way != "plain" else []
        early = sum(task.done() for task in ours)
        await a.resume()
        return {
            "early": early,
            "a": await asyncio.gather(*ours),
            "b": finished or await asyncio.gather(*theirs),
            "aborts": a.aborts,
        }

    async def swap(self, a: Tenant, b: Tenant, c: Tenant) -> dict[str, Any]:
        """One answer spans a swap of A's weights. A raw request beside it shows the spans."""
        ids = [await a.load(self._folders["A1"])]

        async def attempt() -> tuple[asyncio.Task, asyncio.Task] | None:
            a.aborts = 0
            made = await tokens_made(self._url)

            async def has_tokens() -> bool:
                return await tokens_made(self._url) >= made + 20

            tasks = [asyncio.create_task(a.generate(PROMPTS[0]))]
            if await unless_done(tasks, has_tokens):
                begun = asyncio.Event()
                tasks.append(asyncio.create_task(spans_of(self._url, "A", PROMPTS[1], begun)))
                await begun.wait()
                if await a.pause() == 2:
                    return tasks[0], tasks[1]
                await a.resume()
            await asyncio.gather(*tasks)
            return None

        ours, beside = await in_time(attempt)
        ids.append(await a.load(self._folders["A2"]))
        early = ours.done()
        await a.resume()
        result = await ours
        again = await a.generate(PROMPTS[0])
        return {"early": early, "answer": result, "spans": await beside, "aborts": a.aborts, "again": again,
                "lora_int_ids": ids, "rest": await self._rest(a, result["ids"])}  # fmt: skip

    async def _rest(self, a: Tenant, ids: list[int]) -> dict[str, Any]:
        """Return the position at which ``ids`` leave the answer of the first policy, and the answer of the second
        policy to the prompt and the tokens before."""
        await a.load(self._folders["A1"])
        first = (await a.generate(PROMPTS[0]))["ids"]
        at = next((i for i, pair in enumerate(zip(ids, first, strict=True)) if pair[0] != pair[1]), len(ids))
        await a.load(self._folders["A2"])
        rest = await a.generate(PROMPTS[0] + ids[:at], len(ids) - at) if at < len(ids) else {"ids": []}
        return {"at": at, "ids": rest["ids"]}

    async def whole_engine(self, a: Tenant, b: Tenant, c: Tenant) -> dict[str, Any]:
        """A pause of the whole engine freezes all tenants, also with a pause of A beneath it."""
        client = a._client

        async def pause() -> bool:
            await client.pause_generation()
            return await self._all_run(a, b)

        ours, theirs = await self.caught(pause, client.resume_generation, a, b)
        state = await paused(self._url)
        if self._way != "plain":
            await a.pause()
            await a.resume()
        still = await paused(self._url)
        early = sum(task.done() for task in ours + theirs) if self._way != "abort" else 0
        await client.resume_generation()
        return {"state": state, "still": still, "early": early, "a": await asyncio.gather(*ours),
                "b": await asyncio.gather(*theirs)}  # fmt: skip

    async def two_controllers(self, a: Tenant, b: Tenant, c: Tenant) -> dict[str, Any]:
        """Two controllers sync A and B at the same time, three times each, while C only serves."""
        answers: dict[str, list[dict[str, Any]]] = {"A": [], "B": [], "C": []}

        async def pause() -> bool:
            return await asyncio.gather(a.pause(), b.pause()) == [len(PROMPTS)] * 2

        async def resume() -> None:
            await asyncio.gather(a.resume(), b.resume())

        async def sync(tenant: Tenant, policy: str, running: list[asyncio.Task]) -> None:
            await tenant.load(self._folders[policy])
            await tenant.resume()
            answers[tenant.name] += await asyncio.gather(*running)

        for number in (2, 1, 2):
            ours, theirs = await self.caught(pause, resume, a, b)
            if self._way != "plain":
                answers["C"] += await asyncio.gather(*(c.generate(prompt, 100) for prompt in PROMPTS))
            await asyncio.gather(sync(a, f"A{number}", ours), sync(b, f"B{number}", theirs))
        last = {t.name: (await t.generate(PROMPTS[0], 100))["ids"] for t in (a, b)}
        return {"a": answers["A"], "b": answers["B"], "c": answers["C"], "last": last, "state": await paused(self._url)}


async def alone(url: str, folders: dict[str, str]) -> dict[str, Any]:
    """Return the answers of each policy in a server that is idle otherwise."""
    answers: dict[str, Any] = {}
    for policy, folder in folders.items():
        tenant = Tenant(url, f"alone-{policy}", "native")
        await tenant.load(folder)
        answers[policy] = [answer["ids"] for answer in await asyncio.gather(*map(tenant.generate, PROMPTS))]
        await tenant.close()
    return answers


async def spans_of(url: str, lora_name: str, prompt: list[int], begun: asyncio.Event) -> list[dict[str, Any]]:
    """Return the spans of a streamed answer. Sets ``begun`` when the answer has some tokens."""
    body = {"model": lora_name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    spans: list[dict[str, Any]] = []
    async with (
        httpx.AsyncClient(timeout=120, verify=False) as client,
        client.stream("POST", url + "/v1/completions", json=body | {"stream": True}) as reply,
    ):
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                spans += json.loads(line[6:])["choices"][0]["weight_versions"]
                if len(spans) >= 20:
                    begun.set()
    return [spans[0], spans[-1]]


async def post(url: str, path: str, **body: Any) -> Any:
    async with httpx.AsyncClient(timeout=120, verify=False) as client:
        return (await client.post(url + path, json=body)).raise_for_status().json()


async def paused(url: str) -> list[bool]:
    state = await get(url, "/v1/is_paused")
    return [state["rejecting_new_requests"], state["is_paused"]]


async def requests(url: str) -> dict[str, int]:
    """Return how many requests of each adapter the engine has."""
    return {adapter["lora_name"]: adapter["requests"] for adapter in (await get(url, "/v1/adapters"))["adapters"]}


async def main(url: str, *folders: str) -> dict[str, Any]:
    policies = dict(zip(("A1", "A2", "B1", "B2", "C"), folders, strict=True))
    results: dict[str, Any] = {"tokens": TOKENS, "alone": await alone(url, policies)}
    for way in WAYS:
        results[way] = await Cases(url, way, policies).run()
    return results


if __name__ == "__main__":
    print("RESULT " + json.dumps(asyncio.run(main(*sys.argv[1:]))), flush=True)
