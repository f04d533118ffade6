"""The Mixture of Experts that training may start from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from examples.async_grpo.config import START_POLICY, Settings
from examples.async_grpo.learner import scored
from examples.async_grpo.problems import Curriculum
from examples.async_grpo.samples import Sample
from examples.async_grpo.serving import served
from examples.async_grpo.start_mixture import EXPERTS, TOP_K, make
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.scoring import Scorer

PROMPT, ANSWER = [50, 43, 50, 61], [35, 52, 257]  # "2+2="
LAYERS, ROWS = 4, len(PROMPT) + len(ANSWER) - 1


def sample(experts: np.ndarray | None = None) -> Sample:
    return Sample(PROMPT, ANSWER, np.ones(3, bool), np.zeros(3, np.float32), [], routed_experts=experts)


def test_the_mixture_answers_nearly_as_the_dense_model_does_and_learns_with_the_experts_of_each_sample(tmp_path: Path):
    make(tmp_path)
    assert Settings(model=str(tmp_path)).is_mixture and not Settings().is_mixture
    forced = np.zeros((ROWS, LAYERS, TOP_K), np.uint8) + np.arange(EXPERTS - TOP_K, EXPERTS, dtype=np.uint8)
    with paddle.no_grad():
        dense, mixture = Scorer(str(START_POLICY)), Scorer(str(tmp_path))
        [plain, own] = (scored(one, [sample()]).numpy() for one in (dense, mixture))
        both = scored(mixture, [sample(), sample(forced)]).numpy()
    np.testing.assert_allclose(own, plain, atol=0.5)
    np.testing.assert_array_equal(both[:3], own)
    assert (both[3:] != own).all(), "the experts of a sample are used, though another one has none"


@pytest.mark.slow
async def test_answers_of_a_mixture_come_with_experts_that_give_the_server_its_log_probabilities(tmp_path: Path):
    make(tmp_path / "mixture")
    settings = Settings(model=str(tmp_path / "mixture"), group=2, concurrency=1, max_tokens=8)
    with served(settings, tmp_path / "server.log") as server:
        async with RolloutClient(server.url) as client:
            samples, _ = await Curriculum(0).answers(client, settings, *Curriculum(0).draw())
    for one in samples:
        assert one.routed_experts.shape == (len(one.prompt_ids) + len(one.token_ids) - 1, LAYERS, TOP_K)
    with paddle.no_grad():
        found = scored(Scorer(settings.model), samples).numpy()
    np.testing.assert_array_equal(found, np.concatenate([one.logprobs for one in samples]))
