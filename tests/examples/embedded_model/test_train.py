"""Training: the same seed gives the same model, only training problems are used, and answers have the full loss."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np

from examples.embedded_model import arithmetic, tokenizer
from examples.embedded_model.model import ModelConfig
from examples.embedded_model.train import (
    PEAK_LR,
    PROMPT_WEIGHT,
    ROW_LENGTHS,
    WARMUP_STEPS,
    batches,
    document,
    learning_rate,
    train,
)

SMALL = ModelConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16)


def weights_after(steps: int, seed: int) -> dict[str, np.ndarray]:
    return {name: weight.numpy() for name, weight in train(steps, seed, SMALL).weights.items()}


def test_three_steps_from_the_same_seed_give_the_same_weights_bit_for_bit():
    first, second, other = weights_after(3, 5), weights_after(3, 5), weights_after(3, 6)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    assert any(first[name].tobytes() != other[name].tobytes() for name in first)


def test_every_weight_learns():
    before, after = weights_after(0, 5), weights_after(2, 5)
    assert all((before[name] != after[name]).any() for name in before)


def documents(batch_ids: np.ndarray) -> list[str]:
    rows = (bytes(i if i < 256 else 0xFF for i in row) for row in batch_ids.tolist())
    return [piece.decode("latin1") for row in rows for piece in row.split(b"\xff") if b"#" in piece]


def test_batches_contain_complete_training_problems_with_solutions():
    known = {p.solution for p in arithmetic.problems(9, 3000, "train")}
    for batch in islice(batches(9), 6):
        texts = documents(batch.ids)
        assert len(texts) >= len(batch.ids)
        assert all(text in known or text.partition("=")[2] in known for text in texts)


def test_targets_are_the_next_ids_and_only_answers_weigh_fully():
    for batch in islice(batches(2), 6):
        assert batch.ids.shape == batch.targets.shape == batch.weight.shape
        assert batch.ids.shape[1] in ROW_LENGTHS
        np.testing.assert_array_equal(batch.ids[:, 1:], batch.targets[:, :-1])
        assert (batch.weight[batch.targets == tokenizer.PAD_ID] == 0).all()
        assert (batch.weight[batch.targets == tokenizer.END_ID] == 1).all()
        for prompt_only in (tokenizer.USER_ID, tokenizer.ASSISTANT_ID):
            assert (batch.weight[batch.targets == prompt_only] == np.float32(PROMPT_WEIGHT)).all()
        after_prompt = batch.ids == tokenizer.ASSISTANT_ID
        assert after_prompt.any()
        assert (batch.weight[after_prompt] == 1).all()


def test_half_of_the_documents_are_chats_and_half_plain_prompts():
    rng = random.Random(0)
    chats = 0
    for problem in arithmetic.problems(0, 1000, "train"):
        ids, prompt = document(problem, rng)
        assert tokenizer.decode(ids[prompt:]) == problem.solution
        assert ids[-1] == tokenizer.END_ID
        chats += ids[prompt - 1] == tokenizer.ASSISTANT_ID
    assert 430 < chats < 570


def test_the_learning_rate_warms_up_and_falls_to_the_end():
    rates = [learning_rate(step, 1000) for step in range(1000)]
    assert max(rates) == PEAK_LR == rates[WARMUP_STEPS]
    assert rates[:WARMUP_STEPS] == sorted(rates[:WARMUP_STEPS])
    assert rates[WARMUP_STEPS:] == sorted(rates[WARMUP_STEPS:], reverse=True)
    assert 0 < rates[-1] < PEAK_LR / 500
