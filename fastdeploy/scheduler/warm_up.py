"""The steps that are computed before the engine serves requests."""

from __future__ import annotations

from fastdeploy.core.plan import NewSequence, ScheduledChunk, StepPlan
from fastdeploy.core.runner import Runner
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.scheduler.step_cost import StepCost, chunk_keys, step_work

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # rows, of which the last ones are left out where steps are long
LONG_STEP_S = 0.25  # the sizes behind the first step that is longer are learned from requests
SHORT_PASS_S = 1.0  # a pass that is shorter is repeated, and the faster time of each step counts
MOST_DECODES = 32  # steps of at most so many rows are those of running sequences, larger ones have one prompt
START = (512, 2048)  # computed tokens before the prompt that measures attention: the least, and the most


def warm_up(runner: Runner, cost: StepCost, max_num_seqs: int, max_tokens: int) -> None:
    """Compute steps of several sizes and drop the results, so that the first request is not slow. ``cost`` learns from
    all but the first one, which touches the weights. max_num_seqs, max_tokens: of a step.

    The KV goes into free blocks. A later request writes each block before it reads the block.
    """
    info = runner.info
    longest = min(max_tokens, info.max_model_len - 1)
    sizes = [size for size in SIZES if size <= longest]
    if not sizes:
        return
    tokens = [i % info.vocab_size for i in range(info.max_model_len)]
    most_decodes = min(MOST_DECODES, max_num_seqs, info.num_blocks)

    def decodes(count: int) -> list[ScheduledChunk]:
        return [_chunk(number, tokens[:1], 0, [number]) for number in range(count)]

    def prompt(count: int, start: int = 0) -> list[ScheduledChunk]:
        end = start + count
        return [_chunk(0, tokens[:end], start, list(range(-(-end // info.block_size))))]

    _elapsed_s(runner, prompt(1))
    steps, seconds = [], []
    for size in sizes:
        steps.append(decodes(size) if size <= most_decodes else prompt(size))
        seconds.append(_elapsed_s(runner, steps[-1]))
        if seconds[-1] > LONG_STEP_S:
            break
    sizes = sizes[: len(steps)]
    most = max(size for size in sizes if size <= most_decodes)
    start = min(START[1], info.max_model_len - most)
    steps += [prompt(most)] if start < START[0] else [prompt(most), prompt(most, start)]
    seconds += [_elapsed_s(runner, chunks) for chunks in steps[len(sizes) :]]
    if sum(seconds) < SHORT_PASS_S:
        seconds = [min(s, _elapsed_s(runner, chunks)) for s, chunks in zip(seconds, steps, strict=True)]
    near_s = seconds[len(sizes)]
    if most > 1:
        cost.sampled_s = max(seconds[sizes.index(most)] - near_s, 0.0) / (most - 1)
    if start >= START[0]:
        cost.key_s = max(seconds[-1] - near_s, 0.0) / (chunk_keys(start, most) - chunk_keys(0, most))
    for chunks, seconds_of in zip(steps[: len(sizes)], seconds, strict=False):
        cost.observe(seconds_of, *step_work(chunks))


def _chunk(number: int, token_ids: list[int], start: int, blocks: list[int]) -> ScheduledChunk:
    new = NewSequence(("warm-up", number), SamplingParams(temperature=0.0), len(token_ids))
    count = len(token_ids) - start
    return ScheduledChunk(number, start, count, True, ServedWeights(), token_ids, blocks, new)


def _elapsed_s(runner: Runner, chunks: list[ScheduledChunk]) -> float:
    result = runner.execute(StepPlan(0, chunks, []))
    assert result is not None, "a step without between_layers cannot be abandoned"
    return result.elapsed_s
