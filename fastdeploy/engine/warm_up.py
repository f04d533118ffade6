"""Work that the first request would wait for, done before the server is ready."""

from __future__ import annotations

from array import array

from fastdeploy.core.plan import ScheduledChunk, StepPlan
from fastdeploy.core.runner import Runner
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.scheduler.pacer import StepPacer

PROMPT_TOKENS = 256


def warm_up(runner: Runner, pacer: StepPacer) -> None:
    """Compute a prompt, and a token behind it, of which nothing is kept: memory is touched for the first time, and the
    pacer learns what they cost, so that the first burst of prompts is not computed in its small first guesses.

    The KV goes into blocks that no request has; what gets them later writes them before it reads them.
    """
    info = runner.info
    count = min(PROMPT_TOKENS, pacer.max_tokens, info.max_model_len - 1)
    if count < 1:
        return
    tokens = [i % info.vocab_size for i in range(count + 1)]
    runner.execute(_step(runner, tokens, 0, count))  # touches memory, and is not typical
    pacer.observe(count, runner.execute(_step(runner, tokens, 0, count)).elapsed_s)
    pacer.observe(0, runner.execute(_step(runner, tokens, count, 1)).elapsed_s)


def _step(runner: Runner, tokens: list[int], start: int, count: int) -> StepPlan:
    chunk = ScheduledChunk(
        key=("warm-up", 0),
        token_ids=tokens[start : start + count],
        start=start,
        block_table=array("i", range(-(-len(tokens) // runner.info.block_size))),
        sample=True,
        sampling=SamplingParams(temperature=0.0),
        all_token_ids=tokens[: start + count],
        num_prompt_tokens=start + count,
        banned=(),
    )
    return StepPlan(0, [chunk], [])
