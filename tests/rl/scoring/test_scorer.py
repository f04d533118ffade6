"""Input that a scorer refuses, and its state."""

from __future__ import annotations

import shutil

import numpy as np
import paddle
import pytest

from fastdeploy.core.errors import InvalidField, NonFiniteLogits, WeightUpdateRefused
from fastdeploy.rl.scoring import Scorer
from fastdeploy.testing.checkpoints import random_tensors, write_checkpoint
from fastdeploy.testing.tensors import to_bfloat16
from support.specs import SPECS

GOOD = ([5, 6, 7], [8, 9])


@pytest.fixture(scope="module")
def scorer(checkpoints) -> Scorer:
    return Scorer(str(checkpoints["qwen2"]), max_model_len=64)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (([5], []), "sequences[1].output_ids"),
        (([], [5]), "sequences[1].prompt_ids"),
        (([5], [211]), "sequences[1].output_ids"),
        (([-1], [5]), "sequences[1].prompt_ids"),
        (([5], [0.5]), "sequences[1].output_ids"),
        (([5], [[1, 2], [3]]), "sequences[1].output_ids"),
        (([5], "ab"), "sequences[1].output_ids"),
        (([5] * 60, [6] * 5), "sequences[1]"),
        ([[5]], "sequences[1]"),
        (None, "sequences[1]"),
    ],
)
def test_a_sequence_that_cannot_be_scored_is_refused_by_name(scorer, bad, field):
    with pytest.raises(InvalidField) as caught:
        scorer.logprobs([GOOD, bad])
    assert caught.value.field == field
    assert scorer.logprobs([GOOD]).shape == [2]


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), "1", None, True])
def test_a_temperature_that_is_no_number_from_0_on_is_refused(scorer, temperature):
    with pytest.raises(InvalidField) as caught:
        scorer.logprobs([GOOD], temperature)
    assert caught.value.field == "temperature"


def test_no_sequences_are_refused(scorer):
    with pytest.raises(InvalidField) as caught:
        scorer.logprobs([])
    assert caught.value.field == "sequences"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"max_model_len": 9999}, "max_model_len"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"quantization": "int4"}, "quantization"),
        ({"quantization": "int8", "dtype": "float32"}, "quantization"),
    ],
)
def test_a_setting_that_is_not_supported_is_refused(checkpoints, settings, field):
    with pytest.raises(InvalidField) as caught:
        Scorer(str(checkpoints["qwen2"]), **settings)
    assert caught.value.field == field


def test_a_checkpoint_without_one_of_the_weights_is_refused(tmp_path):
    spec = SPECS["qwen2"]
    tensors = random_tensors(spec)
    del tensors["model.norm.weight"]
    with pytest.raises(WeightUpdateRefused, match="model.norm.weight: is missing"):
        Scorer(str(write_checkpoint(tmp_path / "model", spec, tensors)))


def test_a_folder_without_a_checkpoint_is_refused(checkpoints, tmp_path):
    with pytest.raises(InvalidField, match="config.json"):
        Scorer(str(tmp_path))
    shutil.copy(checkpoints["qwen2"] / "config.json", tmp_path)
    with pytest.raises(WeightUpdateRefused):
        Scorer(str(tmp_path))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3.4e38])
def test_parameters_that_are_not_finite_are_refused_and_the_last_values_stay(checkpoints, bad):
    scorer = Scorer(str(checkpoints["qwen2"]))
    before, state = scorer.logprobs([GOOD]).tolist(), scorer.state()
    with paddle.no_grad():
        scorer.parameters["model.norm.weight"][3] = bad
        scorer.parameters["model.embed_tokens.weight"].add_(paddle.ones([1]))
    with pytest.raises(WeightUpdateRefused, match="model.norm.weight"):
        scorer.refresh()
    assert scorer.logprobs([GOOD]).tolist() == before
    assert all(bool((tensor == state[name]).all()) for name, tensor in scorer.state().items())


def test_logits_that_are_not_finite_are_an_error_that_names_the_sequence(checkpoints):
    scorer = Scorer(str(checkpoints["qwen2"]), "float32")
    with paddle.no_grad():
        scorer.parameters["lm_head.weight"][3] = 3e38  # one of the two logits overflows to +inf
        scorer.parameters["lm_head.weight"][4] = -3e38
    scorer.refresh()
    with pytest.raises(NonFiniteLogits, match=r"sequences\[0\]"):
        scorer.logprobs([GOOD])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_state_is_the_parameters_in_the_dtype_of_the_server(checkpoints, dtype):
    scorer = Scorer(str(checkpoints["qwen2_tied"]), dtype)
    tensors = random_tensors(SPECS["qwen2_tied"])
    state = scorer.state()
    assert state.keys() == tensors.keys() == scorer.parameters.keys()
    for name, tensor in tensors.items():
        wanted = to_bfloat16(tensor) if dtype == "bfloat16" else tensor
        np.testing.assert_array_equal(state[name].numpy(), wanted, err_msg=name)
        np.testing.assert_array_equal(scorer.parameters[name].numpy(), tensor, err_msg=name)


def test_changed_parameters_count_from_the_next_refresh_on(checkpoints):
    scorer = Scorer(str(checkpoints["qwen2"]))
    before, state = scorer.logprobs([GOOD]).tolist(), scorer.state()
    kept = {name: tensor.numpy().copy() for name, tensor in state.items()}
    with paddle.no_grad():
        for tensor in scorer.parameters.values():
            tensor.set_value(tensor * 1.1)
    assert scorer.logprobs([GOOD]).tolist() == before
    scorer.refresh()
    assert scorer.logprobs([GOOD]).tolist() != before
    assert all((state[name].numpy() == array).all() for name, array in kept.items()), "an earlier state changed"


def test_the_bits_of_a_sample_do_not_depend_on_the_others(scorer):
    rng = np.random.default_rng(3)
    prompt = rng.integers(4, 211, 37)
    samples = [(prompt, rng.integers(4, 211, count)) for count in (1, 5, 20, 27)] + [(prompt[:9], prompt[9:])]
    together = scorer.logprobs(samples).numpy()
    alone = np.concatenate([scorer.logprobs([sample]).numpy() for sample in samples])
    np.testing.assert_array_equal(together.view(np.uint32), alone.view(np.uint32))
