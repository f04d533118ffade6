"""An engine that shows no weights is checked by its answers: rounding is no difference, and other weights are found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.rl.check_sync import behaviour
from fastdeploy.rl.check_sync.answers import Answer, Completions
from fastdeploy.rl.check_sync.behaviour import Probes, check_behaviour, judge, probe
from fastdeploy.rl.check_sync.bounds import NOISE
from fastdeploy.rl.check_sync.own_run import OwnRun, widened, with_error
from fastdeploy.rl.check_sync.report import ServingState, Verdict
from fastdeploy.rl.check_sync.serving import Calls
from fastdeploy.rl.check_sync.weights import TrainerWeights
from fastdeploy.rl.connection import Connection
from fastdeploy.testing import serve
from fastdeploy.testing.checkpoints import Spec, write_checkpoint
from fastdeploy.testing.models import model_folder
from rl.check_sync.stub_engines import StubEngine, with_older_kv
from support.specs import QWEN_MOE

SPEC = Spec("moe", "Qwen3MoeForCausalLM", "bfloat16", layers=3, head_dim=16, extra=QWEN_MOE, seed=15)
DENSE = Spec("dense", dtype="bfloat16", head_dim=16, seed=3)


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    monkeypatch.setattr(behaviour, "PROMPTS", 32)
    monkeypatch.setattr(behaviour, "LENGTH", 48)
    monkeypatch.setattr(behaviour, "KV_PROMPTS", 6)
    monkeypatch.setattr(behaviour, "KV_LENGTH", 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "dense", DENSE)


@pytest.fixture(scope="module")
def trainer(folder) -> Iterator[TrainerWeights]:
    with TrainerWeights(folder) as trainer:
        yield trainer


def trained(folder: Path, tensors: dict[str, np.ndarray]) -> TrainerWeights:
    return TrainerWeights(tensors, folder)


def answers(trainer: TrainerWeights, tensors: dict[str, np.ndarray], noise: float = 2.0) -> Probes:
    return probe(StubEngine(trainer, tensors, noise), trainer)


def test_a_server_gives_the_same_bits_and_its_prefix_cache_is_checked_when_it_is_hit():
    folder = model_folder("llama")
    with (
        serve(folder, "--dtype", "bfloat16", "--served-model-name", "llama") as server,
        TrainerWeights(folder) as trainer,
    ):
        asked = Completions(Calls(Connection(server.url)), "llama"), ServingState("fastdeploy")
        first, second = check_behaviour(*asked, trainer), check_behaviour(*asked, trainer)
    assert (first.verdict, first.statistic, first.diverged) == (Verdict.EQUAL, 0.0, None)
    assert first.kv is Verdict.UNKNOWN and first.kv_how.startswith("Not tested")
    assert second.kv is Verdict.EQUAL and "tokens of KV from the prefix cache" in second.kv_how


def test_rounding_of_another_engine_is_no_difference_and_the_report_says_what_would_be_found(trainer):
    new = widened(trainer)
    report = judge(answers(trainer, new), trainer)
    assert report.verdict is Verdict.EQUAL and 1 < report.statistic < report.bound == NOISE
    assert report.diverged is None
    planted = with_error(new, new, 2 * report.smallest)
    assert judge(answers(trainer, planted), trainer).verdict is Verdict.DIFFERS


def test_answers_that_could_show_no_error_leave_the_question_open(trainer, monkeypatch):
    monkeypatch.setattr("fastdeploy.rl.check_sync.behaviour.smallest_found", lambda *_: math.inf)
    report = judge(answers(trainer, widened(trainer)), trainer)
    assert report.verdict is Verdict.UNKNOWN and "would not show any error" in report.how


def test_the_first_token_that_diverges_is_named_with_both_tokens(trainer):
    new = widened(trainer)
    planted = {**new, "lm_head.weight": new["lm_head.weight"][::-1].copy()}
    probes = answers(trainer, planted)
    found = judge(probes, trainer).diverged
    assert found is not None and found.position == 0 and found.expected != found.got
    [answer] = [one for one in probes.plain if one.prompt == found.prompt]
    assert (answer.token_ids[0], answer.logprobs[0]) == (found.got, found.got_logprob)


# The smaller one moves log probabilities by less than rounding.
@pytest.mark.parametrize("size", [pytest.param(0.05, marks=pytest.mark.slow), 0.003])
def test_weights_of_earlier_updates_are_named(folder, trainer, size):
    oldest = widened(trainer)
    older = with_error(oldest, oldest, size, seed=1)
    new = with_error(older, older, size, seed=2)
    with trained(folder, new) as now, trained(folder, older) as one, trained(folder, oldest) as two:
        for served, stale_by in ((widened(now), None), (widened(one), 1), (widened(two), 2)):
            report = judge(answers(trainer, served), now, [one, two])
            assert report.stale_by == stale_by, report.how
            assert report.verdict is (Verdict.EQUAL if stale_by is None else Verdict.DIFFERS)
            assert stale_by is None or size > 0.01 or report.statistic < NOISE


def test_a_part_of_the_model_that_an_update_has_missed_is_named(tmp_path):
    folder = write_checkpoint(tmp_path / "moe", SPEC)
    with TrainerWeights(folder) as before:
        old = widened(before)
        new = with_error(old, old, 0.05)
        with trained(folder, new) as now:
            served = {name: (old if ".experts." in name else widened(now))[name] for name in old}
            report = judge(answers(before, served), now, [before])
    assert report.verdict is Verdict.DIFFERS
    assert report.stale_by is None
    for name in ("gate", "up", "down"):
        assert f"model.layers.*.mlp.experts.*.{name}_proj.weight (" in report.how
    assert "attn" not in report.how


@pytest.mark.parametrize("ours", [True, False])
def test_kv_of_older_weights_is_found_in_the_prefix_cache(folder, trainer, ours):
    old = widened(trainer)
    with trained(folder, with_error(old, old, 0.1)) as now:
        new = widened(now)
        probes = answers(trainer, new, 0.0 if ours else 2.0)
        stale = probes._replace(cached=with_older_kv(trainer, new, old, probes.fresh))
        right = probes._replace(cached=with_older_kv(trainer, new, new, probes.fresh))
        report, other = judge(stale, now, ours=ours), judge(right, now, ours=ours)
    assert (report.verdict, report.kv) == (Verdict.EQUAL, Verdict.DIFFERS), report.kv_how
    assert f"{6 * 96} tokens of KV from the prefix cache" in report.kv_how
    assert other.kv is Verdict.EQUAL, other.kv_how


def test_log_probabilities_that_are_not_finite_differ(trainer):
    probes = answers(trainer, widened(trainer))
    probes.plain[0].logprobs[0] = np.nan
    report = judge(probes, trainer)
    assert report.verdict is Verdict.DIFFERS and "not finite" in report.how


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", None), ("bfloat16", "int8")])
def test_float32_and_eight_bits_of_this_server_are_checked_to_the_bit_and_beyond(folder, dtype, quantization):
    with TrainerWeights(folder, dtype=dtype) as trainer:
        run = OwnRun(trainer, dtype, quantization)
        right = answers(trainer, widened(trainer), 0.0)
        right = Probes(*([_scored(run, answer) for answer in some] for some in right))
        run.load(with_error(run.tensors, run.tensors, 0.1))
        wrong = right._replace(plain=[_scored(run, answer) for answer in right.plain])
        first, second = (judge(one, trainer, ours=True, quantization=quantization) for one in (right, wrong))
    assert (first.verdict, first.statistic) == (Verdict.EQUAL, 0.0)
    assert second.verdict is Verdict.DIFFERS


def _scored(run: OwnRun, answer: Answer) -> Answer:
    """Return an answer with the log probabilities of a run."""
    ids, length = answer.prompt + answer.token_ids, len(answer.prompt)
    values = run.logprobs([ids], [1])
    of_prompt = None if answer.prompt_logprobs is None else values[: length - 1]
    return answer._replace(prompt_logprobs=of_prompt, logprobs=values[length - 1 :])


def test_an_engine_that_quantizes_is_not_judged(trainer):
    engine = Completions(Calls(Connection("http://127.0.0.1:9")), "default")
    report = check_behaviour(engine, ServingState("vllm", quantization="fp8"), trainer)
    assert report.verdict is Verdict.UNKNOWN and "fp8" in report.how
