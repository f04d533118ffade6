"""Time and CPU that a gateway adds to a token: ``python -m benchmarks.gateway``.

Two replicas, whose engines sleep for a fixed time in each step, and streams in closed loop. Each token carries the time
at which its engine made it, so its delay is known exactly. Contenders take turns: the replicas themselves ("direct",
streams alternate between them), our gateway, and those of --gateways-python and --ray-python, which are interpreters of
environments with smg, vllm-router and sglang-router, and with ray[serve] and aiohttp.

--no-stream sends the requests of trainers: token ids, and one answer with token ids and log probabilities. Its delays
are those of the last token of each request. --route sends them to another route than /v1/completions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.gateways.serve import MODEL
from benchmarks.lib.processes import cpu_seconds
from benchmarks.lib.report import json_flag, markdown, write_json
from fastdeploy.bench.client import Client
from fastdeploy.bench.stats import percentile
from fastdeploy.bench.timeline import StreamLog
from fastdeploy.testing.process import ServerProcess, command_words, free_port

START_S = 90.0
ROUTERS = {"smg": "smg.launch_router", "vllm-router": "vllm_router.launch_router",
           "sglang-router": "sglang_router.launch_router"}  # fmt: skip


@dataclass(frozen=True)
class Route:
    """A route for tokens. body: of a request, from the prompt's ids and the number of tokens. times: the token's
    logprobs in its reply."""

    path: str
    body: Callable[[list[int], int], dict[str, Any]]
    times: Callable[[Any], list[float]]


GREEDY = {"ignore_eos": True, "temperature": 0}
TRAINER_ROUTES = {
    "completions": Route(
        "/v1/completions",
        lambda ids, n: {"prompt": ids, "max_tokens": n, "logprobs": 0, "return_token_ids": True, **GREEDY},
        lambda reply: reply["choices"][0]["logprobs"]["token_logprobs"],
    ),
    "generate": Route(
        "/generate",
        lambda ids, n: {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": n, **GREEDY}},
        lambda reply: [logprob for logprob, *_ in reply["meta_info"]["output_token_logprobs"]],
    ),
    "inference": Route(
        "/inference/v1/generate",
        lambda ids, n: {"token_ids": ids, "sampling_params": {"max_tokens": n, "logprobs": 0, **GREEDY}},
        lambda reply: [token["logprob"] for token in reply["choices"][0]["logprobs"]["content"]],
    ),
}


@dataclass
class DelayLog(StreamLog):
    """A stream whose logprobs are negative times. delays: seconds from the making of each token to its arrival."""

    delays: list[float] = field(default_factory=list)

    def add_event(self, at: float, payload: bytes) -> None:
        super().add_event(at, payload)
        if payload != b"[DONE]":
            for choice in json.loads(payload).get("choices", ()):
                self.delays += [at + made for made in (choice.get("logprobs") or {}).get("token_logprobs") or ()]


@dataclass(frozen=True)
class Target:
    """A contender. urls: streams alternate between them. process: of the gateway; None = direct."""

    name: str
    urls: Sequence[str]
    process: ServerProcess | None = None

    def gateway_pids(self) -> list[int]:
        """Return the processes that only the gateway needs: of Ray the proxy and the actor, without its daemons."""
        if self.process is None:
            return []
        pids = self.process.processes()
        if self.name != "ray-serve":
            return pids
        actors = ("ray::ProxyActor", "ray::ServeReplica")
        return [pid for pid in pids if "".join(command_words(pid)).startswith(actors)]


@dataclass(frozen=True)
class Phase:
    """Results of one contender in one round. first_tokens: seconds until the first token, or without a stream until the
    reply. cpu_s, engines_cpu_s, serving_cpu_s: CPU seconds per 1,000 tokens, of the gateway, of the engines, and of all
    that serves (gateway, API servers, engines). Times are in seconds."""

    contender: str
    delays: list[float]
    first_tokens: list[float]
    requests_per_s: float
    cpu_s: float
    engines_cpu_s: float
    serving_cpu_s: float


async def measure(target: Target, replicas: Sequence[ServerProcess], args: argparse.Namespace) -> Phase:
    """Run ``streams`` clients, each of which makes ``requests`` streamed requests, one after the other."""
    delays: list[float] = []
    firsts: list[float] = []

    async def stream(client: Client, number: int) -> None:
        log = DelayLog(f"{target.name}-{number}", time.perf_counter())
        body = {"model": MODEL, "prompt": f"stream {number}", "max_tokens": args.tokens, "stream": True}
        stream = await client.stream("/v1/completions", body | GREEDY | {"logprobs": 0}, log.request_id, log)
        await stream.wait_closed()
        if not log.ended_once or len(log.delays) != args.tokens:
            raise RuntimeError(f"{target.name}: {log.error or log.status}, {len(log.delays)} tokens")
        delays.extend(log.delays)
        firsts.append(log.tokens[0].at - log.sent_at)

    async def ask(client: Client, number: int) -> None:
        route, began = TRAINER_ROUTES[args.route], time.perf_counter()
        body = route.body(list(f"stream {number}".encode()), args.tokens)
        made = route.times((await client.call("POST", route.path, body)).checked(target.name))
        if len(made) != args.tokens:
            raise RuntimeError(f"{target.name}: {len(made)} tokens")
        delays.append(time.perf_counter() + made[-1])
        firsts.append(time.perf_counter() - began)

    async def client(number: int) -> None:
        client = Client(target.urls[number % len(target.urls)])
        for _ in range(args.requests):
            await (stream if args.stream else ask)(client, number)

    gateway = target.gateway_pids()
    servers = [process for replica in replicas for process in replica.processes()]
    engines = [process for process in servers if process not in [replica.pid for replica in replicas]]
    watched = (gateway, engines, [*gateway, *servers])
    before, start = [cpu_seconds(pids) for pids in watched], time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(args.streams):
            group.create_task(client(number))
    took = time.perf_counter() - start
    thousands = len(firsts) * args.tokens / 1000
    used = [(cpu_seconds(pids) - cpu) / thousands for pids, cpu in zip(watched, before, strict=True)]
    return Phase(target.name, delays, firsts, len(firsts) / took, *used)


def commands(args: argparse.Namespace, urls: Sequence[str], endpoints: Sequence[str]) -> dict[str, list[str]]:
    """Return the command of each gateway, without its port."""
    found = {"fastdeploy": [sys.executable, "-m", "benchmarks.lib.gateways.serve", "--gateway", *endpoints]}
    if args.gateways_python:
        for name, module in ROUTERS.items():
            start = [args.gateways_python, "-m", module, "--host", "127.0.0.1", "--prometheus-port", str(free_port())]
            found[name] = [*start, "--policy", "round_robin", "--log-level", "error", "--worker-urls", *urls]
    if args.ray_python:
        found["ray-serve"] = [args.ray_python, str(Path(__file__).parent / "lib/gateways/ray_serve.py"), *urls]
    return found


async def run(args: argparse.Namespace) -> list[Phase]:
    """Start everything, warm each contender up, and measure in rounds, each in another order."""
    phases: list[Phase] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        endpoints = [f"ipc://{folder}/engine-{i}" for i in range(2)]
        replica = [sys.executable, "-m", "benchmarks.lib.gateways.serve", "--step-s", str(args.step_ms / 1000)]
        replicas = [stack.enter_context(ServerProcess([*replica, endpoint])) for endpoint in endpoints]
        for process in replicas:
            process.wait_ready(START_S)
        urls = [process.url for process in replicas]
        targets = [Target("direct", urls)]
        for name, command in commands(args, urls, endpoints).items():
            process = stack.enter_context(ServerProcess(command))
            process.wait_ready(START_S, "/health")
            targets.append(Target(name, [process.url], process))
        await asyncio.sleep(args.settle_s)  # the routers ask their workers for models
        for number in range(-1, args.rounds):
            for target in targets[number % len(targets) :] + targets[: number % len(targets)]:
                phase = await measure(target, replicas, args)
                phases += [phase] if number >= 0 else []
    return phases


def table(phases: Sequence[Phase]) -> str:
    """Return the table of all contenders: medians over the rounds, and what each adds to the direct way. On a busy
    machine the fastest tenth of the tokens shows what a gateway adds, and the other columns what the machine does."""
    header = ("contender", "added, fastest tenth, ms", "added, median, ms", "added, p99, ms", "first token, ms",
              "requests/s", "gateway CPU s / 1,000 tokens", "engines CPU s / 1,000 tokens",
              "all serving CPU s / 1,000 tokens")  # fmt: skip
    rows = []
    names = list(dict.fromkeys(phase.contender for phase in phases))
    direct = [phase for phase in phases if phase.contender == "direct"]
    for name in sorted(names, key=lambda name: name != "direct"):
        mine = [phase for phase in phases if phase.contender == name]
        cells = [name]
        for percent in (10, 50, 99):
            plain = [1e3 * percentile(phase.delays, percent) for phase in direct]
            shown = [1e3 * percentile(phase.delays, percent) for phase in mine]
            added = [delay - without for delay, without in zip(shown, plain, strict=True)]
            cells.append(f"({median(shown):.2f})" if name == "direct" else f"{median(added):.2f}")
        first = 1e3 * median(median(p.first_tokens) for p in mine)
        rate, cpu = median(p.requests_per_s for p in mine), median(p.cpu_s for p in mine)
        engines, serving = median(p.engines_cpu_s for p in mine), median(p.serving_cpu_s for p in mine)
        cells += [f"{first:.1f}", f"{rate:.1f}", f"{cpu:.4f}", f"{engines:.4f}", f"{serving:.4f}"]
        rows.append(cells)
    return markdown(header, rows)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2, help="of each stream, one after the other, per round")
    parser.add_argument("--tokens", type=int, default=80, help="of each request")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--route", choices=TRAINER_ROUTES, default="completions", help="of requests without stream")
    parser.add_argument("--step-ms", type=float, default=20.0, help="duration of a step of the engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=3.0)
    parser.add_argument("--gateways-python", help="of the environment of smg, vllm-router and sglang-router")
    parser.add_argument("--ray-python", help="of an environment with ray[serve] and aiohttp")
    json_flag(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    phases = asyncio.run(run(args))
    rounds = [
        {"contender": p.contender, "first_token_ms": 1e3 * median(p.first_tokens),
         "requests_per_s": p.requests_per_s,
         "gateway_cpu_s": p.cpu_s, "engines_cpu_s": p.engines_cpu_s, "serving_cpu_s": p.serving_cpu_s,
         "delay_ms": {percent: 1e3 * percentile(p.delays, percent) for percent in (10, 25, 50, 75, 90, 99)}}
        for p in phases
    ]  # fmt: skip
    write_json(args, {"rounds": rounds})
    print(table(phases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
