"""Sessions of agents, as a rollout of reinforcement learning has them: a heavy tail of turns, growing histories, tools.

The numbers follow published traces of coding agents: a long first prompt, short calls of tools, and answers of tools
that are longer than the calls. The sizes are scaled so that a run takes about a minute.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import dataclass

from benchmarks.lib.fleet.runner import Costs
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.client import FleetClient

# A dense model of 32 billion parameters in bfloat16, with 64 layers and 8 heads of 128 for keys and values, on one H200
# (990 TFLOP/s, 4.8 TB/s): a step reads 64 GB (13.4 ms), a prompt token takes 2 * 32e9 FLOP at half of the peak, and a
# token of context is 262 kB to read. 0.2 ms for each sequence are sampling and Python. 21 GB of KV are 80,000 tokens.
COSTS = Costs(
    step_s=0.0134,
    prompt_s=0.00013,
    decode_s=0.0002,
    context_s=0.055e-6,
    num_blocks=5000,
    block_size=16,
    max_model_len=32768,
    vocab_size=32000,
)
ENGINE = {"max_num_seqs": 32, "max_num_batched_tokens": 512}


@dataclass(frozen=True)
class Turn:
    """new_tokens: of the prompt, behind the history. answer: tokens to generate. pause_s: of the tool afterwards."""

    new_tokens: list[int]
    answer: int
    pause_s: float


@dataclass(frozen=True)
class Session:
    name: str
    start_s: float
    turns: list[Turn]


@dataclass
class Outcome:
    """Of one session, in tokens and seconds. known: prompt tokens that an earlier turn had, too. hits: of all prompts,
    those that were cached."""

    duration_s: float = 0.0
    prompts: int = 0
    known: int = 0
    hits: int = 0


@dataclass(frozen=True)
class Figures:
    """Of one run. hit_rate: of the prompt tokens that an earlier turn of the session had, those that were cached.
    recomputed: the others."""

    longest_s: float
    mean_s: float
    hit_rate: float
    recomputed: int


def make_sessions(num: int, seed: int, max_turns: int = 24) -> list[Session]:
    """Return ``num`` sessions. Turns are Pareto-distributed with the exponent 1.1 (the median is 3), so that a tenth of
    the sessions have half of the turns. All begin within two seconds."""
    draw = random.Random(seed)

    def tokens(median: float, sigma: float, low: int, high: int) -> int:
        return min(max(int(draw.lognormvariate(0.0, sigma) * median), low), high)

    sessions = []
    for i in range(num):
        turns = []
        for k in range(min(int(2 * draw.paretovariate(1.1)), max_turns)):
            new = tokens(2000, 0.4, 500, 6000) if k == 0 else tokens(250, 0.8, 20, 2000)
            prompt = draw.choices(range(1, COSTS.vocab_size), k=new)
            turns.append(Turn(prompt, tokens(40, 0.6, 8, 200), min(draw.expovariate(1 / 0.3), 2.0)))
        sessions.append(Session(f"session-{seed}-{i}", draw.uniform(0, 2), turns))
    return sessions


async def run_session(client: FleetClient, session: Session, adapter: str = "") -> Outcome:
    """Run a session to its end. Raises AssertionError for an answer that is too short."""
    await asyncio.sleep(session.start_s)
    now = asyncio.get_running_loop().time
    began, outcome, history = now(), Outcome(), list[int]()
    for k, turn in enumerate(session.turns):
        prompt = history + turn.new_tokens
        sampling = SamplingParams(max_tokens=turn.answer, temperature=0.0, ignore_eos=True)
        request = AddRequest(f"{session.name}-{k}", prompt, sampling, session=session.name, adapter=adapter)
        answer, cached = await generate(client, request)
        assert len(answer) == turn.answer, f"{session.name}: {len(answer)} tokens instead of {turn.answer}"
        outcome.prompts += len(prompt)
        outcome.known += len(history)
        outcome.hits += min(cached, len(history))
        history = prompt + answer
        if k + 1 < len(session.turns):
            await asyncio.sleep(turn.pause_s)
    outcome.duration_s = now() - began
    return outcome


async def generate(client: FleetClient, request: AddRequest) -> tuple[list[int], int]:
    """Return the tokens of the only choice, and the number of prompt tokens that were cached."""
    tokens, cached, ended = list[int](), 0, False
    with await client.submit(request) as stream:
        while not ended:
            await stream.reader.wait()
            for output in stream.take():
                tokens += output.token_ids
                cached += output.cached_tokens
                ended = output.finish_reason is not None
    return tokens, cached


def figures_of(outcomes: list[Outcome]) -> Figures:
    """Return the figures of a run."""
    durations = [outcome.duration_s for outcome in outcomes]
    known, hits = sum(o.known for o in outcomes), sum(o.hits for o in outcomes)
    return Figures(max(durations), statistics.mean(durations), hits / max(known, 1), known - hits)


def median_of(runs: list[Figures]) -> Figures:
    """Return the median of each figure."""
    return Figures(
        *(
            statistics.median(getattr(run, name) for run in runs)
            for name in ("longest_s", "mean_s", "hit_rate", "recomputed")
        )
    )
