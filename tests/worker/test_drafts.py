"""A step with drafts draws the tokens, and returns the logprobs, of the steps that it replaces: bit for bit, whatever
the drafts are."""

from __future__ import annotations

import random
from collections.abc import Callable

import paddle
import pytest

from fastdeploy.core.plan import NewSequence, NonFinite, Sampled
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.worker.sampler import Sampler
from fastdeploy.worker.sequences import Draws
from support.adapters import cases, write_adapter
from support.runner_ops import with_ops
from support.specs import SPECS, prompt
from support.step_driver import Driver, Sequence, fresh, load
from worker.architectures import with_ops_by_architecture

VOCAB, COUNT, MOST = 211, 24, 7
KINDS = ["right", "wrong", "then wrong", "random", "mixed"]
SETTINGS = [
    {"temperature": 0.0, "logprobs": 3},
    {"logprobs": 0},
    {
        "temperature": 0.7,
        "top_p": 0.9,
        "logprobs": 2,
        "logprobs_mode": "processed",
        "return_sampling_mask": True,
        "return_sampling_mask_logprobs": True,
    },
    {"logprobs": 0, "logprob_token_ids": (3, 77), "temperature": 1.2},
    {"top_k": 5, "repetition_penalty": 1.3, "logprobs": 1, "logprobs_mode": "temperature", "temperature": 1.5},
    {"presence_penalty": 0.5, "frequency_penalty": 0.7, "logprobs": 1, "logprobs_mode": "processed"},
    {"min_p": 0.05},
]


def requests() -> list[Sequence]:
    """Return a request for each of the settings. Every other one may not draw half of the ids."""
    banned = tuple(range(0, VOCAB, 2))
    return [
        Sequence(f"r{i}", prompt(9 + 13 * i, VOCAB), SamplingParams(seed=i, max_tokens=64, **one), i, banned * (i % 2))
        for i, one in enumerate(SETTINGS)
    ]


def guesses(undisturbed: list[Sequence], kind: str, seed: int = 0) -> Callable[[Sequence], list[int]]:
    """Return what drafts for these sequences, whose outputs are known."""
    outputs, draw = {s.name: s.output for s in undisturbed}, random.Random(seed)

    def guess(s: Sequence) -> list[int]:
        now = draw.choice(KINDS[:4]) if kind == "mixed" else kind
        right = outputs[s.name][len(s.output) :][: draw.randint(0, MOST)]
        if now == "wrong":
            return [(token + 1) % VOCAB for token in right]
        if now == "random":
            return [draw.randrange(VOCAB) for _ in right]
        return [*right[:-1], (right[-1] + 1) % VOCAB] if now == "then wrong" and right else right

    return guess


@pytest.mark.parametrize(("make_runner", "name"), with_ops_by_architecture(), indirect=["make_runner"])
def test_drafts_change_no_bit_of_tokens_and_logprobs(name, make_runner):
    runner = make_runner(name)
    undisturbed = Driver(runner).generate(requests(), COUNT)
    for kind in KINDS:
        driver = Driver(runner, guess=guesses(undisturbed, kind))
        drafted = driver.generate([fresh(one) for one in undisturbed], COUNT)
        for one, other in zip(undisturbed, drafted, strict=True):
            assert other.output[:COUNT] == one.output and other.logprobs[:COUNT] == one.logprobs, kind
        assert kind != "right" or driver.steps < COUNT


@pytest.mark.parametrize(("make_runner", "name"), with_ops(["qwen3_bf16"]), indirect=["make_runner"])
def test_drafts_change_no_bit_with_int8_weights(name, make_runner):
    runner = make_runner(name, quantization="int8")
    alone = [Driver(runner).generate([one], COUNT)[0] for one in requests()]
    driver = Driver(runner, guess=guesses(alone, "mixed"))
    for one, other in zip(alone, driver.generate([fresh(one) for one in alone], COUNT), strict=True):
        assert other.output[:COUNT] == one.output and other.logprobs[:COUNT] == one.logprobs


def test_drafts_of_sequences_with_adapters_change_no_bit(make_runner, tmp_path):
    spec = SPECS["qwen3"]
    folders = [write_adapter(tmp_path / kind, spec, adapter) for kind, adapter in list(cases(spec).items())[:2]]

    def run(guess: Callable[[Sequence], list[int]] | None) -> list[Sequence]:
        driver = Driver(make_runner("qwen3"), guess=guess or (lambda _: []))
        served = [load(driver.runner, number, folder) for number, folder in enumerate(folders, 1)]
        return driver.generate([fresh(one, served=served[i]) if i < 2 else one for i, one in enumerate(requests())], 24)

    undisturbed = run(None)
    for one, other in zip(undisturbed, run(guesses(undisturbed, "mixed")), strict=True):
        assert other.output[:24] == one.output and other.logprobs[:24] == one.logprobs


def test_kv_of_wrong_drafts_is_overwritten_after_a_preemption_too(make_runner):
    [undisturbed] = Driver(make_runner("qwen3")).generate([requests()[1]], COUNT)
    driver = Driver(make_runner("qwen3"), guess=guesses([undisturbed], "then wrong"))
    sequence = fresh(undisturbed)
    while len(sequence.output) < COUNT:
        driver.step([sequence], chunk=16)
        if driver.steps % 4 == 0:
            driver.release(sequence)
    assert sequence.output[:COUNT] == undisturbed.output


# ---------------------------------------------------------------- the sampler


def draws(tokens: list[list[int]], counts: list[int], **settings) -> Draws:
    """Return the rows of sequences whose last ``counts[i] - 1`` tokens are drafts."""
    width = max(map(len, tokens))
    padded = paddle.to_tensor([ids + [0] * (width - len(ids)) for ids in tokens], dtype="int32").numpy()
    params = SamplingParams(**{"temperature": 0.0, **settings})
    new, positions, numbers = [], [], []
    for number, (ids, count) in enumerate(zip(tokens, counts, strict=True)):
        positions += range(len(ids) - count + 1, len(ids) + 1)
        numbers += [number] * count
        new += [NewSequence(("r", number), params, 1)] * count
    as_array = paddle.to_tensor
    return Draws(new, as_array(positions).numpy(), padded, as_array(numbers).numpy(), as_array(counts).numpy())


def peaks(*tokens: int | None) -> paddle.Tensor:
    """Return a row of logits for each token, which is the best there. None = a row that is not finite."""
    rows = [[float("nan")] * 5 if token is None else [2.0 * (i == token) for i in range(5)] for token in tokens]
    return paddle.to_tensor(rows)


def sample(logits: paddle.Tensor, of: Draws) -> list:
    return [one if isinstance(one, NonFinite) else one.token_ids for one in
            Sampler(ReferenceOps("float32")).sample(logits, of)]  # fmt: skip


def test_rows_behind_the_first_wrong_draft_are_dropped():
    of = draws([[0, 3, 4], [0], [0, 1, 2, 3]], [3, 1, 4])
    assert sample(peaks(3, 4, 1, 2, 1, 4, 3, 2), of) == [[3, 4, 1], [2], [1, 4]]


def test_a_row_that_is_not_finite_ends_the_tokens_before_it():
    of = draws([[0, 3, 4], [0, 1], [0, 1]], [3, 2, 2])
    assert sample(peaks(3, None, 1, None, 1, 2, None), of) == [[3], NonFinite(1), [2]]


@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
def test_logprobs_are_computed_for_the_rows_that_give_a_token_only(mode):
    class Counting(ReferenceOps):
        rows = 0

        def logprobs(self, logits, batch):
            self.rows += len(batch.token_ids)
            return super().logprobs(logits, batch)

    ops = Counting("float32")
    of = draws([[0, 3, 4], [0, 1]], [3, 2], logprobs=1, logprobs_mode=mode)
    first, second = Sampler(ops).sample(peaks(3, 1, 1, 1, 2), of)
    assert isinstance(first, Sampled) and isinstance(second, Sampled)
    assert (first.token_ids, len(first.logprobs), second.token_ids, len(second.logprobs)) == ([3, 1], 2, [1, 2], 2)
    assert ops.rows == 4


def test_penalties_count_the_drafts_before_a_row():
    of = draws([[0, 3, 3]], [3], presence_penalty=5.0)
    assert sample(peaks(3, 3, 3), of) == [[3, 0]]
