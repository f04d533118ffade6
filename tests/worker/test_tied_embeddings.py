"""Updates of a model whose output layer is its embedding."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.testing.checkpoints import random_tensors, write_checkpoint
from support.specs import SPECS
from support.step_driver import outputs, stage, update
from worker.new_weights import EMBEDDING, HEAD, new_tensors

TIED = replace(SPECS["qwen2_tied"], shards=1)


def test_an_update_of_a_tied_embedding_changes_the_head_too(make_runner, part, fresh):
    runner, new = make_runner("qwen2_tied"), new_tensors(TIED)
    update(runner, part({EMBEDDING: new[EMBEDDING]}), partial=True)
    assert runner.weights.lm_head is runner.weights.embedding
    assert outputs(runner) == fresh(TIED, random_tensors(TIED) | {EMBEDDING: new[EMBEDDING]})


@pytest.mark.parametrize("order", [(HEAD, EMBEDDING), (EMBEDDING, HEAD)])
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_bf16"])
def test_the_head_of_a_tied_model_must_be_the_embedding_that_arrives_before_or_after_it(name, order, make_runner, part):
    runner, spec = make_runner(name), SPECS[name]
    embedding = new_tensors(spec)[EMBEDDING]
    before = outputs(runner)
    serving = random_tensors(spec)[EMBEDDING]
    for head in (embedding, embedding * 2, serving):
        staging = runner.begin_update(True, False)
        first, second = (part({name: {HEAD: head, EMBEDDING: embedding}[name]}) for name in order)
        staging.add(first, {})
        with nullcontext() if head is embedding else pytest.raises(WeightUpdateRefused, match=HEAD):
            staging.add(second, {})
    assert outputs(runner) == before


def test_the_head_of_a_tied_model_alone_must_be_the_embedding_that_serves(make_runner, part):
    runner, old = make_runner("qwen2_tied"), random_tensors(TIED)
    stage(runner, part({HEAD: old[EMBEDDING]}), partial=True)
    with pytest.raises(WeightUpdateRefused, match=HEAD):
        stage(runner, part({HEAD: old[EMBEDDING] + 1}), partial=True)


def test_a_whole_tied_checkpoint_may_carry_the_head_if_it_is_the_embedding(make_runner, tmp_path):
    tensors = random_tensors(TIED)
    update(make_runner("qwen2_tied"), write_checkpoint(tmp_path / "a", TIED, tensors | {HEAD: tensors[EMBEDDING]}))
    other = write_checkpoint(tmp_path / "b", TIED, tensors | {HEAD: tensors[EMBEDDING] + 1})
    with pytest.raises(WeightUpdateRefused, match=HEAD):
        make_runner(other)
