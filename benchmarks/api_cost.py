#!/usr/bin/env python
"""Measure the CPU time of the API server's process while streams run, by kind of request.

    python benchmarks/api_cost.py --model-path ~/.cache/fastdeploy-peers/q05 --json api_cost.json

Starts this engine with one API server. All streams are sent at once, greedy, with ignore_eos and return_token_ids. The
CPU time of all threads of the API server is measured from the time when every stream has its first token until the
first stream ends: in that time no request arrives, ends or is prefilled. Exits 1 if a request failed, 2 if the server
cannot be started or driven.

The server gets a copy of the checkpoint in which every id has a text. Most ids of q05 have none, and an empty text
costs the API server almost nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fastdeploy.testing import ServerProcess

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.engines import DEFAULT_LIMITS, ours
from benchmarks.lib.processes import cpu_seconds
from benchmarks.lib.report import Printer, json_flag, write_json
from fastdeploy.bench.client import Client, ServerError
from fastdeploy.bench.workload import completion, prompt_ids

SERVED = "served"
API_SERVER = "fastdeploy.entrypoints.api_server"
READY_S = 300.0
WARM_UP_TOKENS = 16
HEADER = ("request", "% of a core", "from - to", "CPU us per token", "tok/s")


@dataclass(frozen=True)
class Case:
    """A kind of request. fields: added to its body."""

    name: str
    chat: bool
    fields: dict[str, Any]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, seed: str, index: int, input_len: int, output_len: int) -> dict[str, Any]:
        """Return a request with ``input_len`` random ids as prompt; for chat, with a message of about as many
        characters."""
        body = completion(SERVED, prompt_ids(seed, index, input_len), output_len) | self.fields
        if self.chat:
            words = map(word, body.pop("prompt")[:: len(word(0)) + 1])
            body["messages"] = [{"role": "user", "content": " ".join(words)}]
        return body


CASES = (
    Case("completions", False, {}),
    Case("completions, logprobs 5", False, {"logprobs": 5}),
    Case("chat", True, {}),
    Case("chat, top_logprobs 5", True, {"logprobs": True, "top_logprobs": 5}),
)


@dataclass(frozen=True)
class Cost:
    """Cost of one round, from the time when every stream has a token until the first stream ends. tokens: received by
    the clients in that time. errors: of requests, or of a round without such a time."""

    wall_s: float
    cpu_s: float
    tokens: int
    errors: tuple[str, ...] = ()


def word(token_id: int) -> str:
    """Return a word of four letters, different for each of the first 456,976 ids."""
    return "".join(chr(ord("a") + token_id // 26**place % 26) for place in range(4))


def with_words(model: Path, folder: Path) -> Path:
    """Fill ``folder`` with links to ``model`` and with a tokenizer (byte-level BPE) that has a word for each id that
    had no text. A text is encoded to the same ids as before, since no merge makes the new ones."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab, special = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    # Added tokens that the vocabulary lacks would get new ids behind it.
    vocab |= {token["content"]: token["id"] for token in special}
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    vocab |= {f"\u0120{word(i)}": i for i in set(range(size)) - set(vocab.values())}
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


async def measure(
    client: Client, pids: Sequence[int], case: Case, streams: int, seed: str, input_len: int, output_len: int
) -> Cost:
    """Measure one round of ``case``. pids: processes whose CPU time is measured."""
    seed = f"{seed}/{case.name}"
    bodies = [case.body(seed, index, input_len, output_len) for index in range(streams)]
    sent = [await client.stream(case.path, body, f"{seed}-{index}") for index, body in enumerate(bodies)]
    await asyncio.gather(*(stream.wait_tokens(1) for stream in sent))
    ends = [asyncio.create_task(stream.wait_closed()) for stream in sent]
    cpu, start = cpu_seconds(pids), time.perf_counter()
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    cpu, end = cpu_seconds(pids) - cpu, time.perf_counter()
    logs = await asyncio.gather(*ends)
    errors = [f"{log.request_id}: {fault}" for log in logs if (fault := log.fault(output_len))]
    tokens = sum(log.tokens_between(start, end) for log in logs)
    if not errors and not tokens:
        errors.append(f"{seed}: a stream had ended when the last one began; raise --output-len")
    return Cost(end - start, cpu, tokens, tuple(errors))


async def run(args: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, list[Cost]]:
    """Return the rounds of every case, by its name. The cases alternate."""
    (folder / "model").mkdir()
    engine = ours(with_words(args.model_path, folder / "model"), SERVED)
    with ServerProcess(engine.command) as server:
        say(f"{engine.version}: ready after {server.wait_ready(READY_S, engine.ready):.1f} s")
        target = Client(server.url), server.pids(API_SERVER)
        if len(target[1]) != 1:
            raise ServerError(f"{len(target[1])} processes are API servers by their command lines")
        for case in CASES:
            await measure(*target, case, args.streams, "warm-up", args.input_len, WARM_UP_TOKENS)
        costs: dict[str, list[Cost]] = {case.name: [] for case in CASES}
        for repeat in range(args.repeats):
            for case in CASES:
                cost = await measure(*target, case, args.streams, str(repeat), args.input_len, args.output_len)
                costs[case.name].append(cost)
        return costs


def row(name: str, rounds: Sequence[Cost]) -> tuple[str, ...]:
    """Return a row of the table: medians over the rounds without errors."""
    good = [cost for cost in rounds if not cost.errors]
    if not good:
        return (name, *"-" * (len(HEADER) - 1))
    percents = [100 * cost.cpu_s / cost.wall_s for cost in good]
    return (
        name,
        f"{median(percents):.1f}",
        f"{min(percents):.1f} - {max(percents):.1f}",
        f"{1e6 * median(cost.cpu_s / cost.tokens for cost in good):.0f}",
        f"{median(cost.tokens / cost.wall_s for cost in good):.0f}",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="a Hugging Face folder with a byte-level BPE tokenizer.json")
    add(
        "--streams",
        type=int,
        default=DEFAULT_LIMITS.sequences,
        help="at once (%(default)s, as many as the engine runs)",
    )
    add("--input-len", type=int, default=32)
    add("--output-len", type=int, default=128)
    add("--repeats", type=int, default=3)
    json_flag(parser)
    args = parser.parse_args(argv)
    if not 1 <= args.streams <= DEFAULT_LIMITS.sequences:
        parser.error(f"--streams: 1 to {DEFAULT_LIMITS.sequences}")
    return args


def report(args: argparse.Namespace, printer: Printer) -> int:
    with tempfile.TemporaryDirectory(prefix="api-cost-") as folder:
        costs = asyncio.run(run(args, Path(folder), printer.say))
    title = f"the API server at {args.streams} streams, medians of {args.repeats}"
    printer.table(title, HEADER, [row(*mine) for mine in costs.items()])
    write_json(args, {"cases": {name: [asdict(cost) for cost in rounds] for name, rounds in costs.items()}})
    return printer.failed([error for rounds in costs.values() for cost in rounds for error in cost.errors])


def main(argv: Sequence[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    return printer.exit_code(lambda: report(args, printer))


if __name__ == "__main__":
    sys.exit(main())
