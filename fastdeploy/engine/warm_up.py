"""Work that the first request would wait for, done before the server is ready."""

from __future__ import annotations

from fastdeploy.core.plan import NewSequence, ScheduledChunk, StepPlan
from fastdeploy.core.runner import Runner
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.scheduler.pacer import StepPacer

PROMPT_TOKENS = 256


def warm_up(runner: Runner, pacer: StepPacer) -> None:
    """Compute a prompt, and a token behind it, and keep nothing of them. Memory is touched for the first time, and the
    pacer learns the cost of a step, so that the first burst of prompts is not computed in its small first guesses.

    The KV goes into blocks that no request has. Whoever gets them later writes them before it reads them.
    """
    info = runner.info
    count = min(PROMPT_TOKENS, pacer.max_tokens, info.max_model_len - 1)
    if count < 1:
        return
    tokens = [i % info.vocab_size for i in range(count + 1)]
    _elapsed_s(runner, tokens, 0, count)  # touches memory, and is not typical
    pacer.observe(count, _elapsed_s(runner, tokens, 0, count))
    pacer.observe(0, _elapsed_s(runner, tokens, count, 1))


def _elapsed_s(runner: Runner, tokens: list[int], start: int, count: int) -> float:
    end = start + count
    blocks = list(range(-(-len(tokens) // runner.info.block_size)))
    new = NewSequence(("warm-up", 0), SamplingParams(temperature=0.0), end)
    chunk = ScheduledChunk(0, start, count, True, ServedWeights(), tokens[:end], blocks, new)
    result = runner.execute(StepPlan(0, [chunk], []))
    assert result is not None, "nobody gives up this step"
    return result.elapsed_s
