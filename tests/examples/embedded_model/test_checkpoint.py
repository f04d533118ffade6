"""The committed checkpoint: transformers computes the same, and the model solves a third to a half of its task."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
import pytest

from examples.embedded_model import arithmetic, tokenizer
from examples.embedded_model.checkpoint import load, save
from examples.embedded_model.evaluate import generate
from examples.embedded_model.model import ModelConfig, Qwen3, initial_weights
from fastdeploy.embedded import MODEL_DIR
from support.torch_generation import logits, solve
from support.torch_process import TorchProcess


def test_the_checkpoint_is_whole_and_a_few_megabytes():
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in MODEL_DIR.iterdir()} == names
    assert 1e6 < sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 5e6
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]
    assert config["max_position_embeddings"] == 4096


def test_transformers_computes_the_same_logits(torch_process: TorchProcess):
    problem = arithmetic.make_problem("mul", 4, (1234, 567))
    ids = tokenizer.prompt_ids(problem, chat=True) + tokenizer.encode(problem.solution)
    name, dtype, wanted = torch_process.run(logits, MODEL_DIR, ids)
    assert (name, dtype) == ("Qwen3ForCausalLM", "torch.bfloat16")
    with paddle.no_grad():
        ours = load(MODEL_DIR).logits(paddle.to_tensor([ids]))[0].numpy()
    np.testing.assert_allclose(ours, wanted, atol=1e-3, rtol=0)


@dataclass(frozen=True)
class Answer:
    problem: arithmetic.Problem
    text: str
    length: int  # with the end token
    ended: bool

    @property
    def solved(self) -> bool:
        return arithmetic.is_correct(self.problem, self.text)


def answers(chat: bool) -> list[Answer]:
    """Answer 200 held-out problems greedily, as chat messages or plain prompts, shorter solutions first."""
    problems = sorted(arithmetic.problems(0, 200), key=lambda p: len(p.solution))
    prompts = [tokenizer.prompt_ids(problem, chat) for problem in problems]
    found = generate(load(MODEL_DIR), prompts, max_tokens=400, temperature=0.0, seed=0)
    return [
        Answer(problem, tokenizer.decode(ids), len(ids), ids[-1] == tokenizer.END_ID)
        for problem, ids in zip(problems, found, strict=True)
    ]


@pytest.fixture(scope="module")
def chats() -> list[Answer]:
    return answers(chat=True)


@pytest.mark.slow
def test_batched_decoding_gives_the_completions_of_transformers(chats: list[Answer], torch_process: TorchProcess):
    some = chats[::10]
    reply = torch_process.run(solve, MODEL_DIR, [a.problem.prompt for a in some], chat=True, max_tokens=400)
    wanted = zip(reply["completions"], reply["lengths"], reply["ended"], strict=True)
    agreeing = sum((a.text, a.length, a.ended) == other for a, other in zip(some, wanted, strict=True))
    assert agreeing >= len(some) - 1  # one near-tie may be decided the other way


def test_the_model_solves_a_third_to_a_half_of_heldout_problems(chats: list[Answer]):
    assert 1 / 3 <= statistics.mean(a.solved for a in chats) <= 1 / 2


def test_answers_differ_widely_in_length_and_end_by_themselves(chats: list[Answer]):
    lengths = sorted(a.length for a in chats)
    assert lengths[0] <= 5
    assert lengths[-1] > 200
    assert lengths[180] > 4 * lengths[20]
    assert statistics.mean(a.ended for a in chats) > 0.97


def test_easy_problems_are_solved_more_often_than_hard_ones(chats: list[Answer]):
    def rate(levels: tuple[int, ...]) -> float:
        return statistics.mean(a.solved for a in chats if a.problem.level in levels)

    assert rate((1, 2)) > rate((3, 4))


@pytest.mark.slow
def test_a_plain_prompt_is_answered_too():
    bare = answers(chat=False)
    assert statistics.mean(a.solved for a in bare) > 0.25
    assert statistics.mean(a.ended for a in bare) > 0.97


def test_saving_rounds_to_nearest_even_bfloat16_and_loading_widens_exactly(tmp_path: Path):
    config = ModelConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    weights = initial_weights(config, 0)
    half = 2.0**-8  # of a step between bfloat16 neighbours of 1
    values = [1.0, 1.0 + half, 1.0 + 3 * half, 1.0 + 1.01 * half, -1.0 - half, 1e-40, 0.1, -3e38]
    weights["model.norm.weight"] = paddle.to_tensor(values, dtype="float32")
    save(Qwen3(config, weights), tmp_path)
    back = load(tmp_path)
    assert back.config == config
    assert list(back.weights) == list(weights)
    read = back.weights["model.norm.weight"].numpy()
    np.testing.assert_array_equal(read[:5], [1.0, 1.0, 1.0 + 4 * half, 1.0 + 2 * half, -1.0])
    np.testing.assert_allclose(read[6:], values[6:], rtol=half)
    save(back, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
