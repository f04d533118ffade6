"""Run rollouts with a calculator and check each of them: ``python -m examples.tool_rollout --help``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from examples.embedded_model import arithmetic, tokenizer
from examples.tool_rollout.agent import Agent
from examples.tool_rollout.disturb import disturb
from examples.tool_rollout.rollout import ToolRollout
from fastdeploy.rl.client import RolloutClient

MIN_CACHED = 0.99


async def run(agent: Agent, problems: Sequence[arithmetic.Problem], concurrency: int) -> list[ToolRollout]:
    """Return a rollout per problem. At most ``concurrency`` run at once."""
    places = asyncio.Semaphore(concurrency)

    async def solve(seed: int, problem: arithmetic.Problem) -> ToolRollout:
        async with places:
            return await agent.solve(problem, seed)

    return await asyncio.gather(*(solve(seed, problem) for seed, problem in enumerate(problems)))


async def run_disturbed(agent: Agent, problems: Sequence[arithmetic.Problem], concurrency: int) -> list[ToolRollout]:
    """As :func:`run`, while the server is paused and gets new weights."""
    finished = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        disturber = group.create_task(disturb(agent.client, finished))
        try:
            rollouts = await run(agent, problems, concurrency)
        finally:
            finished.set()
    print("disturbed by", ", ".join(f"{count} x {what}" for what, count in disturber.result().items()))
    return rollouts


def cached_share(rollouts: Sequence[ToolRollout]) -> float:
    """Return the share of the history that came from the prefix cache; see ToolRollout.histories. 1 if there is no
    history."""
    pairs = [pair for rollout in rollouts for pair in rollout.histories()]
    tokens, cached = sum(tokens for tokens, _ in pairs), sum(cached for _, cached in pairs)
    return cached / tokens if tokens else 1.0


def report(rollouts: Sequence[ToolRollout], seconds: float) -> bool:
    """Print what the rollouts are, and return whether every promise was kept."""
    count, turns = len(rollouts), [turn for rollout in rollouts for turn in rollout.turns]
    faults = {number: found for number, rollout in enumerate(rollouts) if (found := rollout.faults())}
    sampled = sum(sum(rollout.mask) for rollout in rollouts)
    replied = sum(len(reply) for rollout in rollouts for reply in rollout.replies)
    first = sum(rollout.tries[:1] == [True] for rollout in rollouts)
    solved = sum(any(rollout.tries) for rollout in rollouts)
    refused = sum(rollout.tool_errors for rollout in rollouts)
    resumed = sum(turn.num_resumes > 0 for turn in turns)
    mixed = sum(len({span.weight_epoch for span in rollout.spans}) > 1 for rollout in rollouts)
    print(f"{count} rollouts in {seconds:.1f} s: {len(turns)} turns, {sampled} tokens sampled, {replied} from the tool")
    print(f"solved: {first / count:.1%} at the first answer, {solved / count:.1%} in the end; refused calls: {refused}")
    print(f"turns of several attempts: {resumed}; rollouts of several versions: {mixed}")
    print(f"intact: {count - len(faults)} of {count}", *list(faults.items())[:10])
    share = cached_share(rollouts)
    print(f"history from the prefix cache, within a version: {share:.2%}", flush=True)
    return not faults and share >= MIN_CACHED


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Serve the embedded model on a free port, and yield the address."""
    command = [sys.executable, "-m", "fastdeploy", "serve", "--port", "0", "--max-num-seqs", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = next((match for line in process.stdout if (match := re.search(r"http://\S+", line))), None)
            if found is None:
                raise SystemExit("the server did not start")
            yield found.group()
        finally:
            process.terminate()


async def main(url: str, arguments: argparse.Namespace) -> bool:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # after the import of Paddle, each request would be a line
    problems = arithmetic.problems(arguments.seed, arguments.rollouts)
    async with RolloutClient(url, eos_ids=[tokenizer.END_ID]) as client:
        agent = Agent(client, arguments.temperature, arguments.tries, with_tool=not arguments.plain)
        start = time.monotonic()
        rollouts = await run(agent, problems, arguments.concurrency)
        good = report(rollouts, time.monotonic() - start)
        if arguments.disturb:
            start = time.monotonic()
            disturbed = await run_disturbed(agent, problems, arguments.concurrency)
            good &= report(disturbed, time.monotonic() - start)
            pairs = list(zip(rollouts, disturbed, strict=True))
            equal = sum(a.ids == b.ids and a.logprobs == b.logprobs for a, b in pairs)
            print(f"with the ids and logprobs of the undisturbed run: {equal} of {len(pairs)}")
            good &= equal == len(pairs)
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server of the embedded model (default: start one)")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64, help="rollouts at once")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tries", type=int, default=4, help="answers that the model may give")
    parser.add_argument("--seed", type=int, default=0, help="which held-out problems")
    parser.add_argument("--plain", action="store_true", help="without the calculator: one turn per problem")
    parser.add_argument("--disturb", action="store_true", help="run again beside pauses and new weights, and compare")
    arguments = parser.parse_args()
    with contextlib.nullcontext(arguments.url) if arguments.url else own_server() as url:
        sys.exit(0 if asyncio.run(main(url, arguments)) else 1)
