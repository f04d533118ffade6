"""Log probabilities over the ids that tokens were drawn from, and the best tokens of a teacher."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.rl.scoring import Scorer
from fastdeploy.worker.model_runner import ModelRunner
from rl.scoring.loop import bits
from support.specs import prompt
from support.step_driver import Driver, Sequence

VOCAB, STEPS, TOP = 211, 12, 64
CUTS: list[dict[str, Any]] = [
    {"top_k": 5}, {"top_p": 0.8, "temperature": 0.7}, {"min_p": 0.2, "temperature": 1.6}, {"temperature": 0.0},
    {"top_k": 40, "top_p": 0.9, "temperature": 1.3},
]  # fmt: skip


def runner_of(checkpoints: Any, model: str, dtype: str) -> ModelRunner:
    return ModelRunner(str(checkpoints[model]), num_blocks=64, dtype=dtype)


def drawn(runner: ModelRunner, **common: Any) -> list[Sequence]:
    """Return one sequence for each of CUTS, generated together."""
    params = [
        SamplingParams(**cut, **common, seed=i, logprobs_mode="processed", max_tokens=STEPS)
        for i, cut in enumerate(CUTS)
    ]
    made = [Sequence(str(i), prompt(9 + 7 * i, VOCAB), one) for i, one in enumerate(params)]
    return Driver(runner).generate(made, STEPS)


def masks_of(entries: list[Logprob]) -> list[np.ndarray]:
    return [np.frombuffer(entry.mask_ids, np.int32) for entry in entries]


def parts(sequence: Sequence) -> tuple[list[int], list[int]]:
    return sequence.ids[: sequence.prompt_len], sequence.output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_over_the_masks_equal_the_servers_to_the_bit(checkpoints, dtype):
    """Of the tokens, and of every id of their masks."""
    model = "qwen3" if dtype == "float32" else "qwen3_bf16"
    asked = {"logprobs": 0, "return_sampling_mask": True, "return_sampling_mask_logprobs": True}
    scorer = Scorer(str(checkpoints[model]), dtype)
    for sequence in drawn(runner_of(checkpoints, model, dtype), **asked):
        ids, output = parts(sequence)
        masks, temperature = masks_of(sequence.logprobs), sequence.sampling.temperature
        found = scorer.logprobs([(ids, output)], temperature, [masks])
        np.testing.assert_array_equal(bits(found.numpy()), bits([one.logprob for one in sequence.logprobs]))
        for k, (mask, entry) in enumerate(zip(masks, sequence.logprobs, strict=True)):
            of_mask = [(ids + output[:k], [int(token)]) for token in mask]
            found = scorer.logprobs(of_mask, temperature, [[mask]] * len(mask)).numpy()
            np.testing.assert_array_equal(bits(found), bits(np.frombuffer(entry.mask_logprobs, np.float32)))


def test_a_teachers_best_tokens_equal_the_servers_to_the_bit(checkpoints):
    """Those of the output in mode temperature, and those of the prompt."""
    runner, scorer = runner_of(checkpoints, "qwen3", "float32"), Scorer(str(checkpoints["qwen3"]), "float32")
    params = SamplingParams(temperature=0.8, seed=3, logprobs=TOP, logprobs_mode="temperature", max_tokens=STEPS)
    [sequence] = Driver(runner).generate([Sequence("a", prompt(20, VOCAB), params)], STEPS)
    ids, values = scorer.top_logprobs([parts(sequence)], TOP, 0.8)
    assert ids.tolist() == [[token for token, _ in entry.top] for entry in sequence.logprobs]
    np.testing.assert_array_equal(bits(values), bits([[p for _, p in entry.top] for entry in sequence.logprobs]))
    chosen = scorer.logprobs([parts(sequence)], 0.8).numpy()
    for rank, row, own in zip([e.rank for e in sequence.logprobs], values, chosen, strict=True):
        assert rank == 1 + (row > own).sum() or (rank > TOP and own < row[-1])


def test_gradients_over_masks_are_those_of_the_renormalised_values(checkpoints):
    scorer = Scorer(str(checkpoints["qwen2"]), "float32")
    samples, mask = [(prompt(7, VOCAB), [9]), (prompt(20, VOCAB), [30])], [9, 30, 77, 140]

    def gradients(values: paddle.Tensor) -> dict[str, np.ndarray]:
        values.sum().backward()
        found = {name: tensor.grad.numpy() for name, tensor in scorer.parameters.items()}
        for tensor in scorer.parameters.values():
            tensor.clear_grad()
        return found

    masked = scorer.logprobs(samples, 0.7, [[mask], [mask]])
    every = scorer.logprobs([(ids, [token]) for ids, _ in samples for token in mask], 0.7).reshape([2, 4])
    plain = paddle.stack([every[0, 0], every[1, 1]]) - every.logsumexp(-1)
    np.testing.assert_allclose(masked.numpy(), plain.numpy(), atol=1e-5)
    found, wanted = gradients(masked), gradients(plain)
    for name, one in wanted.items():
        assert np.abs(found[name] - one).max() <= 2e-5 * np.abs(one).max(), name


@pytest.mark.parametrize(("masks", "field"), [
    ([], "sampling_masks"), ([[[8]]], "sampling_masks[0]"), ([[[8], [8]]], "sampling_masks[0][1]"),
    ([[[8], [9, 211]]], "sampling_masks[0][1]"), ([[[8], [9.5]]], "sampling_masks[0][1]"),
])  # fmt: skip
def test_masks_that_do_not_fit_are_refused_by_name(checkpoints, masks, field):
    scorer = Scorer(str(checkpoints["qwen2"]), max_model_len=64)
    with pytest.raises(InvalidField) as caught:
        scorer.logprobs([([5, 6, 7], [8, 9])], 1.0, masks)
    assert caught.value.field == field
    assert scorer.logprobs([([5, 6, 7], [8, 9])], 1.0, [[[], [9, 8]]]).shape == [2], "no ids: any token"
