"""Loads of sessions for benchmarks of routing. All numbers are drawn from a seed.

rollouts: the rollout of a GRPO step with tools, 64 sessions for each replica, which shares its memory with a trainer.
Eight samples of each prompt begin at once. Public traces give the shape:
the requests of a chat service have 7,590 prompt and 182 output tokens on average (Mooncake, arXiv 2407.00079), sessions
of coding agents have 3 to more than 1,000 requests with about 150 output tokens (semianalysisai/cc-traces on Hugging
Face), and lengths are lognormal with a heavy tail (ServeGen, arXiv 2505.09999). The answers of rollouts have 75 tokens
on average, and no session has more than 24 turns, so that a run takes seconds. The number of sessions for each replica
is our own choice: with 64, the replicas are full, and with 16, the longest session takes little longer than alone.
agents, crowded agents: single sessions of agents with short answers, on replicas with little memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from benchmarks.lib.fleet.runner import Costs

# A dense model of 32 billion parameters in bfloat16, with 64 layers and 8 heads of 128 for keys and values, on one H200
# (990 TFLOP/s, 4.8 TB/s, 141 GB): a step reads 64 GB (13.4 ms), a prompt token takes 2 * 32e9 FLOP at half of the peak,
# and a token of context is 262 kB to read. 0.2 ms for each sequence are sampling and Python. 60 % of the memory less
# the weights are 80,000 tokens of KV.
COSTS = Costs(
    step_s=0.0134,
    prompt_s=0.00013,
    decode_s=0.0002,
    context_s=0.055e-6,
    num_blocks=5000,
    block_size=16,
    max_model_len=65536,
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


@dataclass(frozen=True)
class Load:
    """Sessions for a fleet of ``replicas``. make(seed): returns the sessions. engine: settings of EngineConfig."""

    make: Callable[[int], list[Session]]
    replicas: int
    costs: Costs
    engine: dict[str, Any]


def make_rollouts(seed: int, prompts: int, answer: int, samples: int = 8) -> list[Session]:
    """Return ``samples`` sessions for each prompt. Their turns are lognormal, with the median 5. answer: the median of
    the tokens of an answer; the mean is 1.5 times that."""
    draw = random.Random(seed)
    sessions = []
    for i in range(prompts):
        first = _prompt(draw, _between(draw, 3000, 0.5, 500, 12000))
        for k in range(samples):
            turns, total = list[Turn](), 0
            for _ in range(_between(draw, 5, 0.8, 1, 24)):
                new = _prompt(draw, _between(draw, 250, 1.1, 20, 5000)) if turns else first
                tokens = _between(draw, answer, 0.9, 8, 1000)
                total += len(new) + tokens
                if total >= COSTS.max_model_len:
                    break
                turns.append(Turn(new, tokens, min(draw.lognormvariate(0.0, 1.2), 60.0)))
            sessions.append(Session(f"session-{seed}-{i}-{k}", 0.0, turns))
    return sessions


def make_agents(seed: int, num: int, max_turns: int = 24) -> list[Session]:
    """Return ``num`` sessions. Turns are Pareto-distributed with the exponent 1.1 (the median is 3), so that a tenth of
    the sessions have half of the turns. All begin within two seconds."""
    draw = random.Random(seed)
    sessions = []
    for i in range(num):
        turns = []
        for k in range(min(int(2 * draw.paretovariate(1.1)), max_turns)):
            new = _between(draw, 250, 0.8, 20, 2000) if k else _between(draw, 2000, 0.4, 500, 6000)
            prompt = _prompt(draw, new)
            turns.append(Turn(prompt, _between(draw, 40, 0.6, 8, 200), min(draw.expovariate(1 / 0.3), 2.0)))
        sessions.append(Session(f"session-{seed}-{i}", draw.uniform(0, 2), turns))
    return sessions


def _between(draw: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    """Draw a lognormal number, and cut it off at the limits."""
    return min(max(int(draw.lognormvariate(0.0, sigma) * median), low), high)


def _prompt(draw: random.Random, length: int) -> list[int]:
    return draw.choices(range(1, COSTS.vocab_size), k=length)


LOADS = {
    "rollouts": Load(partial(make_rollouts, prompts=32, answer=50), 4, COSTS, ENGINE),
    "agents": Load(partial(make_agents, num=160), 8, replace(COSTS, num_blocks=6000), ENGINE),
    "crowded agents": Load(partial(make_agents, num=200), 8, COSTS, ENGINE),
}


def alone_s(session: Session, load: Load) -> float:
    """Return the seconds of a session that is alone in the fleet: no policy makes it shorter."""
    costs, chunk = load.costs, load.engine["max_num_batched_tokens"]
    total, context = 0.0, 0
    for turn in session.turns:
        new, steps = len(turn.new_tokens) + bool(context), turn.answer - 1
        total += -(-new // chunk) * costs.step_s + new * costs.prompt_s
        context += len(turn.new_tokens)
        mean = context + steps / 2
        total += steps * (costs.step_s + costs.decode_s + mean * costs.context_s) + turn.pause_s
        context += turn.answer
    return total - session.turns[-1].pause_s
