"""The runner computes what transformers computes, with any other sequences in the step."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from msgspec import structs

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.plan import BlockCopy, StepPlan
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.testing.checkpoints import write_checkpoint
from support.specs import SPECS, prompt
from support.step_driver import GREEDY, Driver, Sequence, fresh, sleep, update
from support.torch_generation import save
from worker.architectures import with_ops_by_architecture

FLOAT32 = [name for name, spec in SPECS.items() if spec.dtype == "float32"]
BFLOAT16 = [name for name, spec in SPECS.items() if spec.dtype == "bfloat16"]
# Rounding keys, values and the left side of every product to 8 bits of mantissa moves a logit by about 2^-9 of its
# size per layer; on these models (logits of 5 to 10, weights scaled up) that is a few hundredths of a nat.
BFLOAT16_MAX, BFLOAT16_MEAN = 0.15, 0.02


def _sequence(length: int, **settings) -> Sequence:
    return Sequence(f"p{length}", prompt(length, 211), **settings)


# The reference is slow: the default suite has three lengths of prompt and few tokens for it, and all for the ops.
lengths = pytest.mark.parametrize("few", [(1, 17, 311), pytest.param((), marks=pytest.mark.slow)], ids=["few", "all"])


def is_short(runner, few: tuple[int, ...]) -> bool:
    """Whether the reference computes a few prompts only."""
    return bool(few) and runner.ops.name == "reference"


def prompts_of(runner, expected: dict, few: tuple[int, ...]) -> dict:
    """Return what transformers says of each length of prompt, or with the reference of a few, if any are named."""
    return {n: expected[n] for n in (few if is_short(runner, few) else expected)}


@lengths
@pytest.mark.parametrize("name", FLOAT32)
def test_greedy_ids_and_logprobs_are_those_of_transformers(name, few, make_runner, expected):
    driver = Driver(make_runner(name))
    wanted, count = prompts_of(driver.runner, expected[name], few), 12 if is_short(driver.runner, few) else 48
    sequences = driver.generate([_sequence(length) for length in wanted], count, chunk=64)
    for sequence, reference in zip(sequences, wanted.values(), strict=True):
        assert reference["margin"].min() > 1e-4, "the fixture has a tie: choose another seed"
        assert sequence.output == reference["ids"][:count].tolist()
        logprobs = np.array([entry.logprob for entry in sequence.logprobs])
        assert np.abs(logprobs - reference["logprobs"][:count]).max() < 1e-3


@pytest.mark.slow  # torch writes the folder
@pytest.mark.parametrize("name", FLOAT32)
def test_a_folder_saved_by_transformers_itself_is_the_same_model(
    name, make_runner, checkpoints, torch_process, tmp_path
):
    runner = make_runner(name)
    before = Driver(runner).generate([_sequence(17)], 8)[0].trace
    torch_process.compute(save, checkpoints[name], tmp_path)
    update(runner, tmp_path)
    assert Driver(runner).generate([_sequence(17)], 8)[0].trace == before


@lengths
@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_logprobs_are_near_transformers_in_float32_on_the_same_weights(name, few, make_runner, expected):
    driver = Driver(make_runner(name))
    top20 = SamplingParams(temperature=0.0, logprobs=20, max_tokens=64)
    errors, stride = [], 12 if is_short(driver.runner, few) else 4
    for length, reference in prompts_of(driver.runner, expected[name], few).items():
        whole = _sequence(length).ids + reference["ids"].tolist()
        for step in range(0, 48, stride):  # along the tokens of transformers: another choice changes no later step
            sequence = Sequence("s", whole[: length + step], top20)
            driver.step([sequence])
            driver.release(sequence)
            top = dict(sequence.logprobs[0].top)
            error = abs(top[whole[length + step]] - reference["logprobs"][step])
            if reference["margin"][step] > 2 * BFLOAT16_MAX:
                assert sequence.output == [whole[length + step]]
            errors.append(error)
    assert max(errors) < BFLOAT16_MAX
    assert np.mean(errors) < BFLOAT16_MEAN


@pytest.mark.parametrize(("make_runner", "name"), with_ops_by_architecture(), indirect=["make_runner"])
def test_bits_do_not_depend_on_the_batch_or_the_chunk_size(name, make_runner):
    driver = Driver(make_runner(name))
    lengths = (1, 17, 70) if driver.runner.ops.name == "reference" else (1, 17, 100, 130)  # it is slow
    alone = [driver.generate([_sequence(length)], 12)[0].trace for length in lengths]
    for chunk in (1, 7, 16, 64, None):
        together = driver.generate([_sequence(length) for length in lengths], 12, chunk)
        assert [s.trace for s in together] == alone, f"chunk size {chunk}"


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_a_sliding_window_changes_exactly_what_is_longer(name, make_runner, tmp_path):
    window = SPECS[name].extra["sliding_window"]
    wide = replace(SPECS[name], extra=SPECS[name].extra | {"sliding_window": 500})
    narrow, whole = make_runner(name), make_runner(write_checkpoint(tmp_path / name, wide))
    within, beyond = ([_sequence(length)] for length in (window - 12, window + 12))
    for sequences, equal in ((within, True), (beyond, False)):
        traces = [Driver(runner).generate([fresh(s) for s in sequences], 12)[0].trace for runner in (narrow, whole)]
        assert (traces[0] == traces[1]) == equal


def test_a_sequence_that_joins_late_changes_no_other(make_runner):
    driver = Driver(make_runner("qwen3"))
    alone = driver.generate([_sequence(31)], 12)[0].trace
    first = _sequence(31)
    for _ in range(4):
        driver.step([first])
    driver.generate([_sequence(100), first, _sequence(2)], 12, chunk=16)
    assert first.trace == alone


def test_recompute_after_preemption_continues_with_the_same_bits(make_runner):
    driver = Driver(make_runner("qwen3"))
    undisturbed = driver.generate([_sequence(64)], 24)[0].trace
    preempted = _sequence(64)
    for at in (5, 6, 17):
        while len(preempted.output) < at:
            driver.step([preempted], chunk=16)
        driver.release(preempted)
    assert driver.generate([preempted], 24)[0].trace == undisturbed


def test_a_copied_partial_block_and_shared_full_blocks_serve_like_the_original(make_runner):
    driver = Driver(make_runner("qwen3"))
    tail = prompt(40, 211)
    donor = Sequence("donor", prompt(40, 211) + [7, 8, 9, 10])
    undisturbed = driver.generate([fresh(donor, name="a")], 16)[0].trace
    other = driver.generate([Sequence("other", tail + [11, 12])], 16)[0].trace
    driver.step([donor])
    # 40 shared tokens: blocks 0 and 1 are full and shared, half of block 2 is copied before both go on
    sharer = Sequence("sharer", tail + [11, 12], computed=40)
    sharer.table = [*donor.table[:2], driver.free.pop()]
    driver.step([donor, sharer], copies=[BlockCopy(donor.table[2], sharer.table[2])])
    while len(sharer.output) < 16:
        driver.step([donor, sharer])
    assert donor.trace[0][:16] == undisturbed[0] and donor.trace[1][:16] == undisturbed[1]
    assert sharer.trace == other


def test_a_chunk_that_does_not_sample_returns_none_and_the_step_still_fills_the_cache(make_runner):
    driver = Driver(make_runner("qwen2_tied"))
    whole = driver.generate([_sequence(64)], 4)[0].trace
    cut = _sequence(64)
    driver.step([cut], chunk=40)
    assert cut.output == [] and cut.computed == 40
    assert driver.generate([cut], 4)[0].trace == whole


def test_a_step_can_be_given_up_after_any_layer_and_repeated(make_runner):
    driver = Driver(make_runner("qwen2_tied"))
    layers = driver.runner.config.num_hidden_layers
    undisturbed = [driver.generate([_sequence(length)], 6)[0].trace for length in (17, 40)]
    one, other = _sequence(17), _sequence(40)
    for step in range(6):
        for stop_after in range(1, layers + 1):
            calls = count(1)

            def between_layers(calls=calls, stop_after=stop_after) -> bool:
                return next(calls) == stop_after

            chunks = [driver.chunk(one, None), driver.chunk(other, 24)]
            assert driver.runner.execute(StepPlan(0, chunks, []), between_layers) is None
        driver.step([one] if step % 2 else [other, one])
    driver.generate([one, other], 6)
    assert [one.trace, other.trace] == undisturbed


def test_a_block_table_too_short_for_its_tokens_is_refused(make_runner):
    driver = Driver(make_runner("qwen2"))
    first, other = _sequence(100), _sequence(17)
    chunks = [driver.chunk(first, None), driver.chunk(other, None)]
    for missing in (1, 2):
        cut = structs.replace(chunks[1], blocks=chunks[1].blocks[:-missing])
        with pytest.raises(AssertionError, match="block table"):
            driver.runner.execute(StepPlan(0, [chunks[0], cut], []))
    driver.runner.execute(StepPlan(0, chunks, []))


def test_the_scratch_of_the_ops_sleeps_too(make_runner, monkeypatch):
    runner, calls = make_runner("qwen2"), []
    monkeypatch.setattr(runner.ops, "free_scratch", lambda: calls.append(runner.cache))
    sleep(runner, "kv_cache")
    assert calls == [None]


def test_a_plan_of_copies_only_is_executed(make_runner):
    runner = make_runner("qwen2")
    result = runner.execute(StepPlan(3, [], [BlockCopy(0, 1)]))
    assert result.sampled == [] and result.step_id == 3 and result.elapsed_s >= 0


def test_info_describes_the_model_and_the_cache(make_runner):
    info = make_runner("qwen2", max_model_len=300).info
    assert info.eos_token_ids == (2, 3)
    assert (info.name, info.vocab_size, info.max_model_len) == ("qwen2", 211, 300)
    assert (info.num_blocks, info.block_size) == (96, 16)


@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "float32"), ("qwen2_bf16", "bfloat16")])
def test_auto_takes_the_type_of_the_checkpoint(name, dtype, make_runner):
    assert make_runner(name, dtype="auto").info.dtype == dtype


def test_the_cache_is_sized_by_blocks_by_bytes_or_by_need(make_runner):
    one_block = make_runner("qwen2", num_blocks=1, max_model_len=16).cache.nbytes
    assert make_runner("qwen2", num_blocks=None, kv_cache_bytes=40 * one_block).info.num_blocks == 40
    enough = make_runner("qwen2", num_blocks=None, kv_cache_bytes=90 * one_block, max_num_seqs=1).info
    assert enough.num_blocks == 90, "what is asked for is taken, even beyond the need of max_num_seqs"
    by_need = make_runner("qwen2", num_blocks=None, max_num_seqs=2).info
    assert by_need.num_blocks == 2 * 512 // 16
    assert make_runner("qwen2", num_blocks=5).info.max_model_len == 80


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("max_model_len", {"max_model_len": 513}),
        ("max_model_len", {"max_model_len": 100, "num_blocks": 6}),
        ("max_model_len", {"num_blocks": None, "kv_cache_bytes": 1}),
        ("kv_cache_gb", {"num_blocks": None, "kv_cache_bytes": 1 << 50}),
        ("num_gpu_blocks_override", {"num_blocks": 1 << 40}),
        ("dtype", {"dtype": "float16"}),
        ("block_size", {"block_size": 24}),
    ],
)
def test_an_impossible_setting_is_refused_by_name(field, settings, make_runner):
    with pytest.raises(InvalidField) as error:
        make_runner("qwen2", **settings)
    assert error.value.field == field


def test_greedy_logprob_is_only_returned_when_asked_for(make_runner):
    driver = Driver(make_runner("qwen2"))
    asks, asks_not = _sequence(16), _sequence(17, sampling=SamplingParams(temperature=0.0))
    top3 = _sequence(31, sampling=SamplingParams(temperature=0.0, logprobs=3))
    driver.step([asks_not, asks, top3])
    assert asks_not.logprobs == [] and len(asks_not.output) == 1
    assert asks.logprobs[0].top == [] and asks.logprobs[0].logprob < 0
    top = top3.logprobs[0].top
    assert len(top) == 3 and top[0] == (top3.output[0], top3.logprobs[0].logprob)
    assert top[0][1] >= top[1][1] >= top[2][1]
    assert asks.trace == driver.generate([_sequence(16, sampling=GREEDY)], 1)[0].trace
