"""Warm-up steps before the server is ready, so that the first request is not slow."""

from __future__ import annotations

from fastdeploy.core.plan import NewSequence, ScheduledChunk, StepPlan
from fastdeploy.core.runner import Runner
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.scheduler.pacer import StepPacer

PROMPT_TOKENS = 256


def warm_up(runner: Runner, pacer: StepPacer) -> None:
    """Compute a prompt twice and one more token, and drop the results. The first step touches the memory. From the next
    two the pacer learns the cost of a step, so that it does not begin with its small first guess.

    The KV goes into free blocks. A later request writes each block before it reads the block.
    """
    info = runner.info
    count = min(PROMPT_TOKENS, pacer.max_tokens, info.max_model_len - 1)
    if count < 1:
        return
    tokens = [i % info.vocab_size for i in range(count + 1)]
    _elapsed_s(runner, tokens, 0, count)  # not observed: the first step is slow
    pacer.observe(count, _elapsed_s(runner, tokens, 0, count))
    pacer.observe(0, _elapsed_s(runner, tokens, count, 1))


def _elapsed_s(runner: Runner, tokens: list[int], start: int, count: int) -> float:
    end = start + count
    blocks = list(range(-(-len(tokens) // runner.info.block_size)))
    new = NewSequence(("warm-up", 0), SamplingParams(temperature=0.0), end)
    chunk = ScheduledChunk(0, start, count, True, ServedWeights(), tokens[:end], blocks, new)
    result = runner.execute(StepPlan(0, [chunk], []))
    assert result is not None, "a step without between_layers cannot be abandoned"
    return result.elapsed_s
