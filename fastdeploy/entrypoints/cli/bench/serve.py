"""``fastdeploy bench serve``: throughput and latency of any server of OpenAI's completions or chats.

Prompts are seeded random token ids, or the lines of a file in FastDeploy's formats EB and EBChat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdeploy.bench.client import FAILURES, Client
from fastdeploy.bench.stats import ServingStats, Spread, summarize
from fastdeploy.bench.timeline import StreamLog
from fastdeploy.bench.workload import completion, open_loop, prompt_ids
from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.bench.checks import require_positive
from fastdeploy.entrypoints.cli.command import Commands
from fastdeploy.entrypoints.cli.server_calls import key_header
from fastdeploy.entrypoints.cli.settings import SettingsParser

CHAT, COMPLETIONS = "openai-chat", "openai"
ENDPOINTS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
DATASETS = ("random", "EB", "EBChat")
METRICS = {"ttft": "first token", "tpot": "per token", "itl": "between chunks", "e2el": "whole request"}
# FastDeploy's times inside its server, and lengths: taken, so that its commands run, and not shown.
NOT_MEASURED = ("s_ttft", "s_itl", "s_e2el", "s_decode", "input_len", "s_input_len", "output_len")
# Of an entry of a file of EB: its name there, and its name in a request.
EB_FIELDS = {"text": "prompt", "max_dec_len": "max_tokens", "temperature": "temperature", "topp": "top_p",
             "penalty_score": "repetition_penalty", "frequency_score": "frequency_penalty",
             "presence_score": "presence_penalty"}  # fmt: skip
WARM_UP = 32  # requests at most
FIRST_WARM_UP = 10**6  # its prompts are others than the measured ones
NOT_DRIVEN = 2


def add_parser(kinds: Commands) -> SettingsParser:
    """Add this kind of measurement."""
    parser = kinds.add_parser("serve", help="throughput and latency of a running server", allow_abbrev=False)
    add = parser.add_argument
    text = "openai-chat: chats; openai: completions (completions, and chats for EBChat)"
    add("--backend", choices=tuple(ENDPOINTS), help=text)
    add("--base-url", metavar="URL", help="of the server (from --host and --port)")
    add("--host", default="127.0.0.1", help="(%(default)s)")
    add("--port", type=int, default=8180, help="(%(default)s)")
    add("--endpoint", metavar="PATH", help="(that of the backend)")
    add("--api-key", metavar="KEY", help="key of the server (or OPENAI_API_KEY, or FASTDEPLOY_API_KEY)")
    add("--model", metavar="NAME", help="model of the requests (the first one that the server lists)")
    add("--served-model-name", metavar="NAME", help="the same, stronger than --model")
    add("--dataset-name", choices=DATASETS, default="random", help="(%(default)s)")
    add("--dataset-path", metavar="FILE", help="of EB and EBChat: one JSON object on each line")
    add("--num-prompts", type=int, default=100, metavar="N", help="requests (%(default)s)")
    add("--random-input-len", type=int, default=1024, metavar="N", help="tokens of a random prompt (%(default)s)")
    add("--random-output-len", type=int, default=128, metavar="N", help="tokens of its answer (%(default)s)")
    add("--max-concurrency", type=int, metavar="N", help="requests at once (no limit)")
    text = "requests in a second, at random times (inf: all at once, or the next one when one ends)"
    add("--request-rate", type=float, default=math.inf, metavar="R", help=text)
    add("--burstiness", type=float, default=1.0, help="1: Poisson arrivals, less: in bursts, more: evenly")
    add("--ignore-eos", action="store_true", help="answers of files run to their longest; random ones always do")
    for name, kind in (("temperature", float), ("top-p", float), ("top-k", int)):
        add(f"--{name}", type=kind, help="of every request (the server's; of random prompts, greedy)")
    add("--seed", type=int, default=0, help="of prompts and arrivals (%(default)s)")
    add("--percentile-metrics", default=",".join(METRICS), help="those that are shown (%(default)s)")
    add("--metric-percentiles", default="50,90,99", metavar="P,P", help="(%(default)s)")
    add("--save-result", action="store_true", help="write the figures as JSON")
    add("--result-dir", metavar="PATH", help="folder of this file (.)")
    add("--result-filename", metavar="NAME", help="its name (bench-TIME.json)")
    add("--disable-tqdm", action="store_true", help=argparse.SUPPRESS)  # FastDeploy's; there is no bar of progress
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, print the figures, and write them if asked. Return the exit status. Raises InvalidField."""
    percents, metrics = _percents(args.metric_percentiles), _metrics(args.percentile_metrics)
    require_positive(args, "num_prompts", "random_input_len", "random_output_len", "max_concurrency")
    require_positive(args, "request_rate", "burstiness")
    backend = args.backend or (CHAT if args.dataset_name == "EBChat" else COMPLETIONS)
    entries = _entries(args, backend)
    url = args.base_url or f"http://{args.host}:{args.port}"
    try:
        client = Client(url, key_header(args.api_key))
        model, logs = asyncio.run(_measure(args, client, args.endpoint or ENDPOINTS[backend], entries))
    except (*FAILURES, ValueError) as error:
        print(f"fastdeploy: cannot go on: {type(error).__name__}: {error}", file=sys.stderr)
        return NOT_DRIVEN
    stats = summarize(logs, percents)
    _show(stats, metrics)
    for why in stats.errors:
        print(f"fastdeploy: failed: {why[:300]}", file=sys.stderr)
    if args.save_result or args.result_filename:
        name = args.result_filename or time.strftime("bench-%Y%m%d-%H%M%S.json")
        path = Path(args.result_dir or ".") / name
        path.write_text(json.dumps({"model_id": model, "num_prompts": len(logs)} | result(stats), indent=1) + "\n")
    return int(bool(stats.errors) or not stats.completed)


async def _measure(
    args: argparse.Namespace, client: Client, endpoint: str, entries: Sequence[dict[str, Any]]
) -> tuple[str, list[StreamLog]]:
    """Return the name of the model and the timeline of each request. A few requests come before, to warm up."""
    model = args.served_model_name or args.model
    if model is None:
        model = (await client.get("/v1/models"))["data"][0]["id"]

    async def one(index: int) -> StreamLog:
        body = _body(args, model, entries, index)
        return await (await client.stream(endpoint, body)).wait_closed()

    async def warm_up(index: int) -> StreamLog:
        return await one(FIRST_WARM_UP + index)

    await open_loop(warm_up, min(args.max_concurrency or 1, args.num_prompts, WARM_UP), math.inf)
    load = (args.num_prompts, args.request_rate, args.max_concurrency, args.burstiness, args.seed)
    return model, await open_loop(one, *load)


def _body(args: argparse.Namespace, model: str, entries: Sequence[dict[str, Any]], index: int) -> dict[str, Any]:
    """Return the body of request number ``index``."""
    given = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    options = {name: value for name, value in given.items() if value is not None}
    if not entries:
        prompt = prompt_ids(args.seed, index, args.random_input_len)
        return completion(model, prompt, args.random_output_len) | options
    if args.ignore_eos:
        options["ignore_eos"] = True
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, **entries[index % len(entries)], **usage, **options}


def _entries(args: argparse.Namespace, backend: str) -> list[dict[str, Any]]:
    """Return the fields of each entry of the file; [] for random prompts. Raises InvalidField."""
    if args.dataset_name == "random":
        if backend == CHAT:
            raise InvalidField("backend", "expected openai for random prompts, which are token ids")
        return []
    if args.dataset_path is None:
        raise InvalidField("dataset_path", f"expected a file for {args.dataset_name}")
    if (backend == CHAT) != (args.dataset_name == "EBChat"):
        raise InvalidField("backend", "expected openai for EB, and openai-chat for EBChat")
    names = {"messages": "messages", "max_tokens": "max_tokens"} if backend == CHAT else EB_FIELDS
    try:
        lines = [line for line in Path(args.dataset_path).read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [{names[key]: value for key, value in json.loads(line).items() if key in names} for line in lines]
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidField("dataset_path", f"expected a JSON object on each line: {error}") from None
    wanted = "messages" if backend == CHAT else "prompt"
    if not found or not all(wanted in entry for entry in found):
        raise InvalidField("dataset_path", f"expected entries with {'messages' if backend == CHAT else 'text'!r}")
    return found


def result(stats: ServingStats) -> dict[str, Any]:
    """Return the figures by FastDeploy's names. Latencies are in milliseconds."""
    figures: dict[str, Any] = {
        "completed": stats.completed,
        "failed": stats.failed,
        "duration": stats.duration_s,
        "total_output_tokens": stats.output_tokens,
        "request_throughput": stats.requests_per_s,
        "output_throughput": stats.tokens_per_s,
        "errors": list(stats.errors),
    }
    for name, found in _spreads(stats).items():
        figures[f"mean_{name}_ms"] = 1000 * found.mean
        figures |= {f"p{percent}_{name}_ms": 1000 * value for percent, value in found.at.items()}
    return figures


def _spreads(stats: ServingStats) -> dict[str, Spread]:
    return dict(zip(METRICS, (stats.ttft, stats.tpot, stats.itl, stats.e2e), strict=True))


def _show(stats: ServingStats, metrics: Sequence[str]) -> None:
    rows = [
        ("requests completed", str(stats.completed)),
        ("requests failed", str(stats.failed)),
        ("duration s", f"{stats.duration_s:.2f}"),
        ("output tokens", str(stats.output_tokens)),
        ("output tokens/s", f"{stats.tokens_per_s:.1f}"),
        ("requests/s", f"{stats.requests_per_s:.2f}"),
    ]
    for name, value in rows:
        print(f"{name:24}{value}")
    for name, found in _spreads(stats).items():
        if name in metrics and found.count:
            percentiles = "".join(f"  p{percent} {1000 * value:.1f}" for percent, value in found.at.items())
            print(f"{METRICS[name] + ' ms':24}mean {1000 * found.mean:.1f}{percentiles}")


def _percents(text: str) -> list[float]:
    """Return the percentiles; whole numbers as int, so that 99 is named p99. Raises InvalidField."""
    try:
        percents = [float(word) for word in text.split(",")]
    except ValueError:
        percents = []
    if not percents or not all(0 <= percent <= 100 for percent in percents):
        raise InvalidField("metric_percentiles", f"expected numbers from 0 to 100 with commas between, got {text!r}")
    return [int(percent) if percent.is_integer() else percent for percent in percents]


def _metrics(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not set(words) <= {*METRICS, *NOT_MEASURED}:
        raise InvalidField("percentile_metrics", f"expected some of {', '.join(METRICS)}, got {text!r}")
    return words
