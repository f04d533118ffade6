#!/usr/bin/env python
"""Measure what speculation gains, and what it costs where there is nothing to gain; and replay groups offline.

    python benchmarks/speculation.py --repeats 5 --json speculation.json
    python benchmarks/speculation.py --replay                           # no server: tokens per step by drafts of a step

For each load, two servers run with the same checkpoint, one of them with --no-enable-speculative-decoding. Both get
the load in turn, with new seeds in each repeat. All checkpoints have the sizes of q05, so a step costs the same:

    groups     the embedded model made larger: 8 samples of one arithmetic problem at temperature 1, group after group;
               and the tail of a group, the last sample alone when the 7 others have ended
    edits      a model that goes through a text, with edits: 1 and 4 streams at temperature 1
    random     random weights at temperature 1: 1, 8 and 32 streams of text that nothing predicts

The ratio is the tokens per second with speculation over those without, the median of the repeats. --markdown writes the
table for docs/benchmarks.md. Exits 1 if a request fails or the two servers give different tokens or log probabilities,
2 if a server cannot be started.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastdeploy.testing import ServerProcess

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import make_model
from benchmarks.lib.engines import ours
from benchmarks.lib.report import Printer, json_flag, markdown, some_of, write_json
from benchmarks.lib.text_models import write_editor, write_large_embedded
from examples.embedded_model import arithmetic, tokenizer
from fastdeploy import LLM, SamplingParams
from fastdeploy.bench.client import Client
from fastdeploy.bench.workload import prompt_ids
from fastdeploy.scheduler.ngram_index import NgramIndex, Text

SERVED = "model"
READY_S = 300.0
DRAFTED, ACCEPTED = "fastdeploy:spec_decode_num_draft_tokens_total", "fastdeploy:spec_decode_num_accepted_tokens_total"
KINDS = ("groups", "edits", "random")
SAMPLES = 8  # of a group
LINES, WORDS = 40, 8  # of the text that is edited


class Load(NamedTuple):
    """body(number): of a request. requests: of one repeat, ``at_once`` at a time. siblings: samples of the same prompt
    that are made before each request, and not timed."""

    name: str
    body: Callable[[int], dict[str, Any]]
    requests: int
    at_once: int
    siblings: int = 0


class Outcome(NamedTuple):
    """The replies to one repeat of a load: tokens and logprobs of each choice."""

    seconds: float
    tokens: int
    choices: list[tuple[list[int], Any]]


def body(prompt: list[int], seed: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    common = {"model": SERVED, "temperature": 1.0, "return_token_ids": True, "logprobs": 0}
    return common | {"prompt": prompt, "seed": seed, "max_tokens": max_tokens} | fields


def text_lines() -> list[list[int]]:
    """Return the text that is edited: each token stands in one place."""
    return [[1000 + WORDS * i + k for k in range(WORDS)] for i in range(LINES)]


def hard_problems(count: int) -> list[arithmetic.Problem]:
    """Return problems whose solutions are long."""
    found = (p for p in arithmetic.stream(0, "heldout") if p.level >= 3)
    return [next(found) for _ in range(count)]


def loads_of(kind: str) -> list[Load]:
    if kind == "groups":
        problems = hard_problems(256)

        def group(number: int) -> dict[str, Any]:
            problem = problems[number % len(problems)]
            return body(tokenizer.prompt_ids(problem, chat=True), number, 320, n=SAMPLES)

        def last(number: int) -> dict[str, Any]:
            return group(number) | {"n": 1, "first_choice": SAMPLES - 1}

        return [Load("groups of 8", group, 2, 1), Load("tail of a group of 8", last, 1, 1, SAMPLES - 1)]
    if kind == "edits":
        known = [token for line in text_lines() for token in line]

        def edit(number: int) -> dict[str, Any]:
            return body(known, number, 200, ignore_eos=True)

        return [Load(f"edits, {n} streams", edit, n, n) for n in (1, 4)]

    def noise(number: int) -> dict[str, Any]:
        return body(prompt_ids("random", number, 32), number, 64, ignore_eos=True)

    return [Load(f"random, {n} streams", noise, n, n) for n in (1, 8, 32)]


def write_checkpoint(kind: str, folder: Path) -> None:
    if kind == "groups":
        write_large_embedded(folder)
    elif kind == "edits":
        write_editor(folder, text_lines())
    else:
        make_model.main([str(folder)])


async def run_load(client: Client, load: Load, first: int) -> Outcome:
    """Send the requests of one repeat. first: the number of the first of them. Raises ServerError."""
    gate = asyncio.Semaphore(load.at_once)
    numbers = range(first, first + load.requests)

    async def send(fields: dict[str, Any]) -> Any:
        return await client.call("POST", "/v1/completions", fields, 600.0)

    async def one(number: int) -> list[tuple[list[int], Any]]:
        async with gate:
            reply = await send(load.body(number))
        choices = sorted(reply.checked(load.name)["choices"], key=lambda choice: choice["index"])
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    for number in numbers if load.siblings else ():
        (await send(load.body(number) | {"n": load.siblings, "first_choice": 0})).checked(load.name)
    began = time.perf_counter()
    replies = await asyncio.gather(*(one(number) for number in numbers))
    seconds = time.perf_counter() - began
    choices = [choice for reply in replies for choice in reply]
    return Outcome(seconds, sum(len(ids) for ids, _ in choices), choices)


async def compare(urls: Sequence[str], loads: Sequence[Load], repeats: int) -> list[dict[str, Any]]:
    """Run each load at the servers with and without speculation, in turn. Return the figures of each load."""
    clients, found = [Client(url) for url in urls], []
    next_number = 0  # no request comes twice: the server would remember its tokens
    for load in loads:
        firsts = range(next_number, next_number + (repeats + 1) * load.requests, load.requests)
        next_number = firsts.stop
        for client in clients:
            await run_load(client, load, firsts[0])  # learns what steps cost
        before, runs, same = await clients[0].metrics(), list[list[Outcome]](), True
        for first in firsts[1:]:
            pair = [await run_load(client, load, first) for client in clients]
            same = same and pair[0].choices == pair[1].choices
            runs.append(pair)
        after = await clients[0].metrics()
        rates = [[run.tokens / run.seconds for run in pair] for pair in runs]
        ratios = sorted(rate[0] / rate[1] for rate in rates)
        drafted = after[DRAFTED] - before[DRAFTED]
        found.append({
            "load": load.name,
            "with": statistics.median(rate[0] for rate in rates),
            "without": statistics.median(rate[1] for rate in rates),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "drafted_per_token": drafted / sum(pair[0].tokens for pair in runs),
            "accepted": (after[ACCEPTED] - before[ACCEPTED]) / drafted if drafted else None,
            "same": same,
        })  # fmt: skip
    return found


def measure(kind: str, repeats: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="speculation-") as parent, ExitStack() as stack:
        write_checkpoint(kind, Path(parent) / kind)
        command = ours(Path(parent) / kind, SERVED).command
        commands = (command, (*command, "--no-enable-speculative-decoding"))
        servers = [stack.enter_context(ServerProcess(words)) for words in commands]
        for server in servers:
            server.wait_ready(READY_S)
        return asyncio.run(compare([server.url for server in servers], loads_of(kind), repeats))


@dataclass
class Sample:
    """A sample of the replay. tokens: prompt and output. known: so many of them are generated."""

    tokens: list[int]
    prompt: int
    known: int
    text: Text

    def step(self, index: NgramIndex, most: int) -> int:
        """Verify at most ``most`` drafts. Return the tokens that the step makes."""
        index.extend(self.text, self.tokens, self.known, self.prompt)
        room = min(most, len(self.tokens) - self.known - 1)
        drafts, _ = index.predict(self.text, self.tokens[: self.known], room, 0.0)
        coming = self.tokens[self.known :]
        right = next((i for i, draft in enumerate(drafts) if draft != coming[i]), len(drafts))
        self.known += right + 1
        if self.known == len(self.tokens):
            index.extend(self.text, self.tokens, self.known, self.prompt)
        return right + 1


def generated_groups(count: int) -> list[list[tuple[list[int], list[int]]]]:
    """Return the prompt and the output of 8 samples of the embedded model at temperature 1, for each group."""
    prompts = [tokenizer.prompt_ids(problem, chat=True) for problem in arithmetic.problems(0, count)]
    params = [SamplingParams(n=8, temperature=1.0, max_tokens=320, seed=i) for i in range(count)]
    with LLM(max_num_seqs=64) as llm:
        outputs = llm.generate(prompts, params)
    return [[(prompt, c.token_ids) for c in o.outputs] for prompt, o in zip(prompts, outputs, strict=True)]


def tokens_per_step(groups: Sequence[Sequence[tuple[list[int], list[int]]]], most: int, together: bool) -> float:
    """Return the tokens per step of each sample, if each step verifies ``most`` drafts. together: all samples of a
    group go on at once, one step each; otherwise one after another, as at the tail of a batch."""
    index, steps, made = NgramIndex(), 0, 0
    for group in groups:
        left = [Sample([*prompt, *output], len(prompt), len(prompt), Text(0)) for prompt, output in group]
        while left:
            for sample in left if together else left[:1]:
                made += sample.step(index, most)
                steps += 1
            left = [sample for sample in left if sample.known < len(sample.tokens)]
    return made / steps


def replay(args: argparse.Namespace, printer: Printer) -> int:
    groups, drafts = generated_groups(40), (2, 4, 8)
    found = {
        name: [tokens_per_step(groups, most, together) for most in drafts]
        for name, together in (("one sample after another", False), ("8 samples at once", True))
    }
    header = ("tokens per step", *(f"{most} drafts" for most in drafts))
    rows = [(name, *(f"{value:.2f}" for value in values)) for name, values in found.items()]
    printer.table("40 groups of 8 samples of the embedded model, temperature 1", header, rows)
    write_json(args, {"replay": found})
    return 0


def ratio_cell(median: float, ratios: Sequence[float]) -> str:
    return f"{median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def run(args: argparse.Namespace, printer: Printer) -> int:
    rows = [row for kind in args.loads for row in measure(kind, args.repeats)]
    header = ("load", "tok/s", "without", "ratio", "drafts per token", "right")
    cells = [
        (r["load"], f"{r['with']:.1f}", f"{r['without']:.1f}", ratio_cell(r["ratio"], r["ratios"]),
         f"{r['drafted_per_token']:.2f}", "" if r["accepted"] is None else f"{r['accepted']:.0%}")
        for r in rows
    ]  # fmt: skip
    printer.table(f"speculation, {args.repeats} repeats", header, cells)
    write_json(args, {"loads": rows})
    if args.markdown:
        args.markdown.write_text(markdown(header, cells))
    return printer.failed([f"{row['load']}: other tokens or logprobs" for row in rows if not row["same"]])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=some_of(KINDS), default=list(KINDS), help="default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--replay", action="store_true", help="only replay groups, without a server")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    json_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, printer = parse(argv), Printer()
    return printer.exit_code(lambda: (replay if args.replay else run)(args, printer))


if __name__ == "__main__":
    sys.exit(main())
