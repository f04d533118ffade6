"""Logprobs of the modes raw, temperature and processed, compared with torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from fastdeploy.core.plan import StepPlan
from fastdeploy.core.sampling_params import LOGPROBS_MODES, SamplingParams
from support import torch_logprobs
from support.specs import prompt
from support.step_driver import Driver, Sequence

TOP, STEPS = 4, 10
# Rounding to bfloat16 moves a logit by a hundredth on average and by up to 0.2 in the worst of some 1,400
# (0.0192 and 0.165 seen with AMX, 0.0108 and 0.138 with AVX-512).
BFLOAT16_MAX, BFLOAT16_MEAN = 0.2, 0.02


Setting = dict[str, Any]
PLAIN: Setting = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PLAIN |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "banned": ()}
PENALTIES: Setting = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3}
SETTINGS: list[Setting] = [
    PLAIN,
    PLAIN | {"temperature": 0.7},
    PLAIN | {"temperature": 1.3, "top_k": 7, "top_p": 0.9},
    PLAIN | PENALTIES | {"temperature": 0.9, "min_p": 0.05},
    PLAIN | {"temperature": 1.1, "top_p": 0.6, "repetition_penalty": 1.2, "banned": (2, 3)},
    PLAIN | {"temperature": 0.8, "top_k": 300, "top_p": 0.95, "min_p": 0.01},  # top_k beyond the vocabulary
    PLAIN | {"temperature": 0.0, "repetition_penalty": 1.5, "banned": (2, 3)},
]


def sequences(lengths: tuple[int, ...] = (9, 40)) -> list[tuple[Setting, Sequence]]:
    """Return one sequence for each setting and mode, for one batch."""
    made = []
    for k, setting in enumerate(SETTINGS):
        fields = {name: value for name, value in setting.items() if name != "banned"}
        for mode in LOGPROBS_MODES:
            params = SamplingParams(**fields, seed=7 + k, logprobs=TOP, logprobs_mode=mode, max_tokens=64)
            ids = prompt(lengths[k % len(lengths)], 211)
            made.append((setting, Sequence(f"{k}-{mode}", ids, params, banned=setting["banned"])))
    return made


def run(runner, made: list[Sequence], monkeypatch) -> list[np.ndarray]:
    """Generate all sequences together. Returns the raw logits of each, [steps, V]."""
    seen: list[np.ndarray] = []
    logits = runner.model.logits

    def spy(*args):
        seen.append(logits(*args).numpy())
        return logits(*args)

    monkeypatch.setattr(runner.model, "logits", spy)
    Driver(runner).generate(made, STEPS)
    return [np.stack([step[i] for step in seen]) for i in range(len(made))]


def described(cases: list[tuple[Setting, Sequence]]) -> list[dict[str, Any]]:
    """Return the sequences as the cases of torch_logprobs.told."""
    return [{"ids": s.ids, "prompt": s.prompt_len, "mode": s.sampling.logprobs_mode} | setting for setting, s in cases]


def told(sequence: Sequence) -> np.ndarray:
    """Return the logprobs [steps, 1 + TOP] in the form of the reference: -inf where fewer tokens could be drawn."""
    rows = [[entry.logprob, *(logprob for _, logprob in entry.top)] for entry in sequence.logprobs]
    return np.array([row + [-np.inf] * (1 + TOP - len(row)) for row in rows])


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3_bf16", marks=pytest.mark.slow)])  # starts torch
def test_logprobs_of_each_mode_equal_those_of_torch(name, make_runner, checkpoints, torch_process, monkeypatch):
    runner, cases = make_runner(name), sequences()
    logits = run(runner, [s for _, s in cases], monkeypatch)
    asked = described(cases)
    # In bfloat16 the tokens depend on the kernels of this machine, so there is no stored reference.
    reference = torch_process.run if name == "qwen3" else torch_process.compute
    own = reference(torch_logprobs.told, checkpoints[name], asked, TOP)
    given = [torch_logprobs.logprobs_of(case, rows, TOP) for case, rows in zip(asked, logits, strict=True)]
    errors = []
    for i, (setting, sequence) in enumerate(cases):
        got, label = told(sequence), f"{setting} {sequence.sampling.logprobs_mode}"
        assert np.isfinite(got[:, 0]).all(), f"{label}: a token of probability 0 was drawn"
        np.testing.assert_allclose(got, given[i], atol=2e-5, rtol=1e-5, err_msg=label)
        if name == "qwen3":
            np.testing.assert_allclose(got, own[i], atol=3e-3, err_msg=label)
        elif sequence.sampling.logprobs_mode != "processed":  # a token at the edge of the kept set may be in or out
            scale = setting["temperature"] or 1.0
            np.testing.assert_allclose(got, own[i], atol=BFLOAT16_MAX / scale, err_msg=label)
            errors.append(np.abs(got - own[i]) * scale)
    assert name == "qwen3" or np.mean(np.concatenate(errors)) < BFLOAT16_MEAN


def test_the_mode_changes_no_token_and_rows_are_independent(make_runner):
    runner, cases = make_runner("qwen3"), sequences()
    Driver(runner).generate([s for _, s in cases], STEPS)
    for k in range(len(SETTINGS)):
        of_setting = cases[k * len(LOGPROBS_MODES) : (k + 1) * len(LOGPROBS_MODES)]
        assert len({tuple(s.output) for _, s in of_setting}) == 1
    for (_, alone), (_, together) in zip(sequences(), cases, strict=True):
        Driver(runner).generate([alone], STEPS)
        assert alone.trace == together.trace


def test_tokens_that_cannot_be_drawn_are_not_among_the_top_logprobs(make_runner):
    params = SamplingParams(top_k=2, logprobs=TOP, logprobs_mode="processed", seed=1, max_tokens=8)
    sequence = Driver(make_runner("qwen3")).generate([Sequence("a", prompt(9, 211), params)], 6)[0]
    for token, entry in zip(sequence.output, sequence.logprobs, strict=True):
        assert len(entry.top) == 2 and token in dict(entry.top)
        assert sum(np.exp(logprob) for _, logprob in entry.top) == pytest.approx(1.0, abs=1e-6)


def kept_ids(sequence: Sequence) -> list[list[int]]:
    return [np.frombuffer(entry.mask_ids, "<i4").tolist() for entry in sequence.logprobs]


def test_the_kept_ids_are_those_that_the_processed_logprobs_are_over(make_runner):
    common = {"logprobs_mode": "processed", "return_sampling_mask": True, "max_tokens": 8}
    asked = [
        SamplingParams(top_k=12, top_p=0.9, temperature=1.2, seed=1, logprobs=20, **common),
        SamplingParams(min_p=0.3, seed=2, logprobs=20, **common),
        SamplingParams(top_p=0.95, temperature=30.0, seed=3, logprobs=0, **common),
        SamplingParams(temperature=0.0, logprobs=0, **common),
        SamplingParams(seed=4, logprobs=0, **common),
        SamplingParams(top_k=3, seed=5, logprobs=0, logprobs_mode="processed", max_tokens=8),
    ]
    made = [Sequence(str(i), prompt(9, 211), params) for i, params in enumerate(asked)]
    cut, peaked, flat, greedy, whole, silent = Driver(make_runner("qwen3")).generate(made, 8)
    for sequence in (cut, peaked):
        for token, entry, ids in zip(sequence.output, sequence.logprobs, kept_ids(sequence), strict=True):
            assert token in ids and ids == sorted(t for t, _ in entry.top)
    assert all(len(ids) > 100 for ids in kept_ids(flat)), "more ids than logprobs may be asked of"
    assert kept_ids(greedy) == [[token] for token in greedy.output]
    assert kept_ids(whole) == kept_ids(silent) == [[]] * 8


@pytest.mark.parametrize("name", ["qwen3", "qwen2_bf16"])
def test_prompt_logprobs_are_those_of_torch_however_the_prompt_is_cut(name, make_runner, checkpoints, torch_process):
    runner = make_runner(name)
    ids = prompt(311, 211)

    def computed(chunk: int) -> list:  # a chunk of 311 rows takes several slices of logits
        driver = Driver(runner)
        sequence, found = Sequence("p", ids, SamplingParams(temperature=0.0, prompt_logprobs=TOP)), []
        beside = Sequence("other", prompt(64, 211))
        while sequence.computed < len(ids):
            asked = driver.chunk(sequence, chunk)
            rows = min(asked.count, len(ids) - 1 - sequence.computed)
            chunks = [driver.chunk(beside, None), structs.replace(asked, prompt_logprobs=rows)]
            result = runner.execute(StepPlan(0, chunks, []))
            found += result.prompt_logprobs.get(1, [])
            sequence.computed += asked.count
        return found

    whole = computed(311)
    assert computed(50) == whole and len(whole) == 310
    case = Sequence("p", ids, SamplingParams(temperature=0.0), prompt_len=1)
    (expected,) = torch_process.run(torch_logprobs.told, checkpoints[name], described([(PLAIN, case)]), TOP)
    got = np.array([[e.logprob, *(logprob for _, logprob in e.top)] for e in whole])
    np.testing.assert_allclose(got, expected, atol=2e-3 if name == "qwen3" else BFLOAT16_MAX)
    assert np.abs(got - expected).mean() < 0.02


def test_the_logprobs_of_given_ids_are_those_that_the_whole_vocabulary_has(make_runner):
    """At the positions of the prompt too. A token that cannot be drawn has -9999, as in vLLM."""
    asked, ids = (5, 190, 5, 0), prompt(40, 211)
    for fields in ({"logprobs_mode": "raw"}, {"logprobs_mode": "processed", "top_k": 9, "temperature": 0.6}):
        every = SamplingParams(logprobs=211, prompt_logprobs=211, seed=1, max_tokens=6, **fields)
        given = SamplingParams(logprobs=0, prompt_logprobs=0, logprob_token_ids=asked, seed=1, max_tokens=6, **fields)
        runs = []
        for params in (every, given):
            driver = Driver(make_runner("qwen3"))
            sequence = driver.generate([Sequence("a", list(ids), params)], 6)[0]
            asks = Sequence("p", list(ids), params)
            chunk = structs.replace(driver.chunk(asks, None), prompt_logprobs=len(ids) - 1)
            runs.append([*sequence.logprobs, *driver.runner.execute(StepPlan(0, [chunk], [])).prompt_logprobs[0]])
        for whole, one in zip(*runs, strict=True):
            of_all = dict(whole.top)
            assert one.top == [(token, of_all.get(token, -9999.0)) for token in asked]
            assert (one.logprob, one.rank) == (whole.logprob, whole.rank) and of_all[
                whole.top[one.rank - 1][0]
            ] == one.logprob
