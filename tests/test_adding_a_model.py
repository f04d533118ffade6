"""docs/adding-a-model.md: the file of an architecture that the page shows is all that a new architecture needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.weight_source import FileSource
from fastdeploy.model_executor import models
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.rl.scoring import Scorer
from fastdeploy.testing.tensors import write_safetensors
from fastdeploy.worker.model_runner import ModelRunner
from rl.scoring.plain import plain_logprobs
from support.markdown import ROOT, blocks
from support.specs import prompt
from support.step_driver import Driver, Sequence, update

NAME = "ExampleForCausalLM"
CONFIG = {
    "architectures": [NAME],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "window": 21,
    "eos_token_id": 2,
}
PROMPTS = [prompt(length, 211) for length in (3, 50)]
LENGTH = 12
PARTS = {  # of the tensors that the example stacks: the names of transformers, and the rows of each
    "attention.qkv": {"self_attn.q_proj": 64, "self_attn.k_proj": 32, "self_attn.v_proj": 32},
    "mlp.wide": {"mlp.gate_proj": 96, "mlp.up_proj": 96},
    "attention.out": {"self_attn.o_proj": 64},
    "mlp.narrow": {"mlp.down_proj": 64},
    "first_norm": {"input_layernorm": 64},
    "second_norm": {"post_attention_layernorm": 64},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Put the page's file among the architectures, and give a checkpoint with random values for its parameters."""
    [code] = [block for block in blocks(ROOT / "docs" / "adding-a-model.md") if block.language == "python"]
    package, folder = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("example")
    (package / "example.py").write_text(code.text)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "__path__", [*models.__path__, str(package)])
        patch.setitem(models.ARCHITECTURES, NAME, models._found("ARCHITECTURES")[NAME])
        write_safetensors(folder / "model.safetensors", random_tensors(folder, 0))
        yield folder


def random_tensors(folder: Path, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    model = models.build_model(models.load_config(folder), get_ops("float32"), 64)
    shapes = {name: shape for parameter in model.parameters for name, shape in parameter.shapes.items()}
    return {
        name: (rng.normal(0, 1.5 * shape[-1] ** -0.5, shape) if len(shape) > 1 else rng.normal(1, 0.3, shape)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def sampled(runner: ModelRunner) -> tuple[list[tuple[list[int], list[int]]], np.ndarray]:
    """Return prompts with sampled outputs, and the log probability of each output token."""
    settings = SamplingParams(seed=1, logprobs=0, max_tokens=LENGTH)
    found = Driver(runner).generate([Sequence(f"s{i}", [*ids], settings) for i, ids in enumerate(PROMPTS)], LENGTH, 16)
    logprobs = [entry.logprob for sequence in found for entry in sequence.logprobs]
    return [(ids, s.output) for ids, s in zip(PROMPTS, found, strict=True)], np.array(logprobs, np.float32)


def in_names_of_transformers(tensors: dict[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
    """Split the tensors that the example stacks."""
    found = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight").split(".", 3)[-1]
        parts = PARTS.get(stem, {stem: tensor.shape[0]})
        for part, piece in zip(parts, paddle.split(tensor, list(parts.values())), strict=True):
            found[name.replace(stem, part)] = piece
    return found


def test_the_ops_and_the_reference_agree(folder):
    runners = [
        ModelRunner(str(folder), num_blocks=32, ops=ops("float32"), dtype="float32") for ops in (get_ops, ReferenceOps)
    ]
    (samples, values), (of_reference, wanted) = map(sampled, runners)
    assert samples == of_reference
    np.testing.assert_allclose(values, wanted, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_scorer_equals_the_server_and_its_gradients_are_those_of_plain_paddle(folder, dtype):
    samples, values = sampled(ModelRunner(str(folder), num_blocks=32, dtype=dtype))
    scorer = Scorer(str(folder), dtype)
    logprobs = scorer.logprobs(samples)
    np.testing.assert_array_equal(logprobs.numpy().view(np.uint32), values.view(np.uint32))
    upstream = paddle.to_tensor(np.random.default_rng(1).normal(size=len(values)).astype(np.float32))
    (logprobs * upstream).sum().backward()
    rounded = {name: tensor.astype("float32") for name, tensor in scorer.state().items()}
    for tensor in rounded.values():
        tensor.stop_gradient = False
    plain = plain_logprobs(str(folder), in_names_of_transformers(rounded), samples, 1.0, [None, CONFIG["window"]])
    np.testing.assert_allclose(plain.numpy(), values, atol=1e-4 if dtype == "float32" else 0.5)
    (plain * upstream).sum().backward()
    for name, tensor in rounded.items():
        wanted, found = tensor.grad.numpy(), scorer.parameters[name].grad.numpy()
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max(), name


def test_an_update_of_one_tensor_serves_and_has_its_checksum(folder, tmp_path):
    runner = ModelRunner(str(folder), num_blocks=32, dtype="float32")
    (_, before), new = sampled(runner), random_tensors(folder, 1)
    name = "model.layers.1.attention.qkv.weight"
    write_safetensors(tmp_path / "part.safetensors", {name: new[name]})
    update(runner, FileSource(str(tmp_path / "part.safetensors")), partial=True)
    tensors = random_tensors(folder, 0) | {name: new[name]}
    assert runner.checksums() == {n: hashlib.sha256(array.tobytes()).hexdigest() for n, array in tensors.items()}
    assert (sampled(runner)[1] != before).any()
