"""Sessions that run through a gateway's client, and what they measured."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, fields

from benchmarks.lib.fleet.loads import Session
from benchmarks.lib.report import percentile
from fastdeploy.client.request_stream import Reader
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.client import FleetClient


@dataclass
class Outcome:
    """Of one session, in tokens and seconds. known: prompt tokens that an earlier turn had, too. hits: of all prompts,
    those that were cached."""

    duration_s: float = 0.0
    turns: int = 0
    prompts: int = 0
    known: int = 0
    hits: int = 0


@dataclass(frozen=True)
class Figures:
    """Of one run. short: the sessions with at most the median number of turns. hit_rate: of the prompt tokens that an
    earlier turn of the session had, those that were cached. recomputed: the others."""

    longest_s: float
    p99_s: float
    mean_s: float
    short_mean_s: float
    short_p99_s: float
    hit_rate: float
    recomputed: float


async def run_session(client: FleetClient, session: Session) -> Outcome:
    """Run a session to its end. Raises AssertionError for an answer that is too short."""
    await asyncio.sleep(session.start_s)
    now = asyncio.get_running_loop().time
    began, outcome, history = now(), Outcome(), list[int]()
    for k, turn in enumerate(session.turns):
        prompt = history + turn.new_tokens
        sampling = SamplingParams(max_tokens=turn.answer, temperature=0.0, ignore_eos=True)
        request = AddRequest(f"{session.name}-{k}", prompt, sampling, session=session.name)
        answer, cached = await generate(client, request)
        assert len(answer) == turn.answer, f"{session.name}: {len(answer)} tokens instead of {turn.answer}"
        outcome.prompts += len(prompt)
        outcome.known += len(history)
        outcome.hits += min(cached, len(history))
        history = prompt + answer
        if k + 1 < len(session.turns):
            await asyncio.sleep(turn.pause_s)
    outcome.duration_s, outcome.turns = now() - began, len(session.turns)
    return outcome


async def generate(client: FleetClient, request: AddRequest) -> tuple[list[int], int]:
    """Return the tokens of the only choice, and the number of prompt tokens that were cached."""
    tokens, cached, ended = list[int](), 0, False
    with await client.submit(request, Reader(for_tokens=False)) as stream:
        while not ended:
            await stream.reader.wait()
            for output in stream.read():
                tokens += output.token_ids
                cached += output.cached_tokens
                ended = output.finish_reason is not None
    return tokens, cached


def figures_of(outcomes: list[Outcome]) -> Figures:
    """Return the figures of a run."""
    durations = sorted(outcome.duration_s for outcome in outcomes)
    typical = statistics.median(outcome.turns for outcome in outcomes)
    short = sorted(outcome.duration_s for outcome in outcomes if outcome.turns <= typical)
    known, hits = sum(o.known for o in outcomes), sum(o.hits for o in outcomes)
    return Figures(
        longest_s=durations[-1],
        p99_s=percentile(durations, 99),
        mean_s=statistics.mean(durations),
        short_mean_s=statistics.mean(short),
        short_p99_s=percentile(short, 99),
        hit_rate=hits / max(known, 1),
        recomputed=known - hits,
    )


def median_of(runs: list[Figures]) -> Figures:
    """Return the median of each figure."""
    names = [field.name for field in fields(Figures)]
    return Figures(**{name: statistics.median(getattr(run, name) for run in runs) for name in names})
