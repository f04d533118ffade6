"""Gradients of the scorer are those of Paddle's autograd through a straightforward forward pass, and those of torch."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastdeploy.model_executor.models import load_config
from fastdeploy.model_executor.models.experts import experts_of_config
from fastdeploy.rl.scoring import Scorer
from rl.scoring.plain import plain_logprobs
from support.specs import SPECS
from support.torch_scoring import scored

VOCAB = 211
MODELS = sorted(SPECS)


def samples(seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Return samples of many lengths; some share their prompt."""
    rng = np.random.default_rng(seed)
    found = []
    for length in (1, 5, 16, 17, 40):
        prompt = rng.integers(4, VOCAB, length).tolist()
        found += [(prompt, rng.integers(4, VOCAB, count).tolist()) for count in (1, 9, 30)]
    return found


def upstream_of(count: int) -> paddle.Tensor:
    """Return a gradient of each log probability."""
    return paddle.to_tensor(np.random.default_rng(1).normal(size=count).astype(np.float32))


def routing_of(folder: str) -> list[np.ndarray] | None:
    """Return random experts for each token of ``samples()``; None for a dense model."""
    info, rng = experts_of_config(load_config(folder)), np.random.default_rng(2)
    if info is None:
        return None
    shapes = [(len(prompt + output) - 1, len(info.layers), info.num_experts) for prompt, output in samples()]
    return [np.argsort(rng.random(shape))[..., : info.top_k] for shape in shapes]


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    """Assert that each gradient differs by at most ``tolerance`` of the largest value of its tensor."""
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        if not one.any():
            assert not found[name].any(), name
            continue
        error = np.abs(found[name] - one).max() / np.abs(one).max()
        few = name.endswith("sinks")  # four numbers, each the sum of all tokens, in which most cancels out
        assert error <= (4 if few else 1) * tolerance, f"{name}: {error:g}"


# make test has each model in the type of its checkpoint.
@pytest.mark.parametrize(
    ("model", "temperature", "dtype"),
    [
        pytest.param(model, temperature, dtype, marks=[] if dtype == SPECS[model].dtype else pytest.mark.slow)
        for model, temperature in [*((model, 1.0) for model in MODELS), ("qwen2", 0.7), ("gemma", 0.7)]
        for dtype in ("float32", "bfloat16")
    ],
)
def test_gradients_are_those_of_plain_paddle_at_the_rounded_weights(checkpoints, model, dtype, temperature):
    scorer, routing = Scorer(str(checkpoints[model]), dtype, max_tokens=200), routing_of(str(checkpoints[model]))
    logprobs = scorer.logprobs(samples(), temperature, routed_experts=routing)
    upstream = upstream_of(logprobs.shape[0])
    (logprobs * upstream).sum().backward()
    rounded = {name: tensor.astype("float32") for name, tensor in scorer.state().items()}
    for tensor in rounded.values():
        tensor.stop_gradient = False
    plain = plain_logprobs(str(checkpoints[model]), rounded, samples(), temperature, routing=routing)
    (plain * upstream).sum().backward()
    error = np.abs(plain.numpy() - logprobs.numpy()).max()
    assert error < (1e-4 if dtype == "float32" else 0.5)
    unused = "e_score_correction_bias"  # only the choice depends on it
    wanted = {n: np.zeros(t.shape) if unused in n else t.grad.numpy() for n, t in rounded.items()}
    assert_close({name: t.grad.numpy() for name, t in scorer.parameters.items()}, wanted, 1e-5)


@pytest.mark.parametrize(
    "model",
    ["qwen2", "qwen2_tied", "qwen3_wide", "llama", "llama_tied", "ernie_bias", "mistral", "gemma", "gemma_biased"],
)
def test_log_probabilities_and_gradients_are_those_of_transformers(checkpoints, torch_process, model):
    few = samples()[::4]
    scorer = Scorer(str(checkpoints[model]), "float32")
    logprobs = scorer.logprobs(few, 0.7)
    upstream = upstream_of(logprobs.shape[0])
    (logprobs * upstream).sum().backward()
    wanted = torch_process.run(scored, checkpoints[model], few, upstream.tolist(), 0.7)
    np.testing.assert_allclose(logprobs.numpy(), wanted["logprobs"], atol=1e-4)
    assert_close({name: t.grad.numpy() for name, t in scorer.parameters.items()}, wanted["gradients"], 1e-4)


def test_gradients_add_up_over_calls_and_stop_at_frozen_parameters(checkpoints):
    folder = str(checkpoints["qwen2"])
    whole, parts = Scorer(folder), Scorer(folder)
    upstream = upstream_of(whole.logprobs(samples()).shape[0])
    (whole.logprobs(samples()) * upstream).sum().backward()
    first = sum(len(output) for _, output in samples()[:7])
    frozen = "model.layers.0.mlp.down_proj.weight"
    parts.parameters[frozen].stop_gradient = True
    (parts.logprobs(samples()[:7]) * upstream[:first]).sum().backward()
    (parts.logprobs(samples()[7:]) * upstream[first:]).sum().backward()
    assert parts.parameters.pop(frozen).grad is None
    found, wanted = ({n: t.grad.numpy() for n, t in one.parameters.items()} for one in (parts, whole))
    del wanted[frozen]
    assert_close(found, wanted, 1e-5)


def test_gradients_belong_to_the_weights_of_the_call_and_not_to_later_ones(checkpoints):
    undisturbed, refreshed = (Scorer(str(checkpoints["qwen2"])) for _ in range(2))
    undisturbed.logprobs(samples()).sum().backward()
    logprobs = refreshed.logprobs(samples())
    with paddle.no_grad():
        for tensor in refreshed.parameters.values():
            tensor.add_(paddle.full(tensor.shape, 0.1))
    refreshed.refresh()
    logprobs.sum().backward()
    for name, tensor in undisturbed.parameters.items():
        np.testing.assert_array_equal(refreshed.parameters[name].grad.numpy(), tensor.grad.numpy(), err_msg=name)


def test_samples_without_a_gradient_give_zeros(checkpoints):
    scorer = Scorer(str(checkpoints["qwen2"]))
    (scorer.logprobs(samples()) * 0.0).sum().backward()
    assert all(not tensor.grad.numpy().any() for tensor in scorer.parameters.values())


def test_the_backward_pass_leaves_the_settings_of_paddle_as_they_were(checkpoints):
    name = "FLAGS_use_stride_kernel"
    before = paddle.get_flags(name)
    Scorer(str(checkpoints["qwen2"])).logprobs(samples()[:1]).sum().backward()
    assert paddle.get_flags(name) == before
