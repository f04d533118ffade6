"""Tensors come out as they were written, and lm_head of a tied model is either the embedding or refused."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from checkpoints import SPECS, bfloat16_bits, random_tensors, write_checkpoint, write_safetensors
from fastdeploy.errors import WeightUpdateRefused
from fastdeploy.model_executor.loader import Checkpoint
from fastdeploy.model_executor.model_config import load_config
from fastdeploy.model_executor.models.qwen import Qwen
from fastdeploy.model_executor.ops.reference import ReferenceOps

TIED = SPECS["qwen2_tied"]


def _load(folder):
    model = Qwen(load_config(folder), ReferenceOps("float32"), 64)
    with Checkpoint(folder) as checkpoint:
        return model.load(checkpoint)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_tensors_come_out_as_they_were_written(shards, tmp_path):
    spec = replace(SPECS["qwen3"], shards=shards)
    folder = write_checkpoint(tmp_path / "c", spec)
    with Checkpoint(folder) as checkpoint:
        for name, array in random_tensors(spec).items():
            read = checkpoint.read(name)
            assert read.dtype == np.float32 and np.array_equal(read, array)


def test_bfloat16_is_read_as_bits_and_float16_is_widened(tmp_path):
    values = np.array([[1.5, -2.25], [3e-5, 7.0]], np.float32)
    tensors = {"b": bfloat16_bits(values), "h": values.astype(np.float16), "f": values}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("b").dtype == np.uint16
        assert np.array_equal(checkpoint.read("b"), bfloat16_bits(values))
        assert np.array_equal(checkpoint.read("h"), values.astype(np.float16).astype(np.float32))
        np.testing.assert_allclose(checkpoint.read_float32("b"), values, rtol=2**-8)
        mixed = checkpoint.read_parts(["b", "f"])
        assert [part.dtype for part in mixed] == [np.float32, np.float32]
        assert checkpoint.read_parts(["b", "b"])[0].dtype == np.uint16


def test_a_scalar_and_an_empty_tensor_are_read(tmp_path):
    write_safetensors(
        tmp_path / "model.safetensors", {"s": np.float32(3).reshape(()), "e": np.zeros((0, 4), np.float32)}
    )
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("s") == 3 and checkpoint.read("e").shape == (0, 4)


def test_a_tied_model_takes_an_equal_lm_head_and_refuses_another(tmp_path):
    tensors = random_tensors(TIED)
    head = tensors["model.embed_tokens.weight"]
    weights = _load(write_checkpoint(tmp_path / "equal", TIED, tensors | {"lm_head.weight": head.copy()}))
    assert weights.lm_head is weights.embedding
    with pytest.raises(WeightUpdateRefused, match="lm_head.weight"):
        _load(write_checkpoint(tmp_path / "other", TIED, tensors | {"lm_head.weight": head + 1}))


def test_tied_embeddings_are_held_once(tmp_path):
    untied = replace(TIED, tied=False)
    tied_bytes = _load(write_checkpoint(tmp_path / "tied", TIED)).nbytes
    untied_bytes = _load(write_checkpoint(tmp_path / "untied", untied)).nbytes
    assert untied_bytes - tied_bytes == 4 * TIED.vocab * TIED.hidden


def test_the_refusal_tells_machines_which_tensor(tmp_path):
    tensors = random_tensors(TIED)
    del tensors["model.norm.weight"]
    with pytest.raises(WeightUpdateRefused) as error:
        _load(write_checkpoint(tmp_path / "c", TIED, tensors))
    assert error.value.detail == {"tensor": "model.norm.weight"}


def test_no_file_stays_open_whether_loading_succeeds_or_fails(tmp_path):
    good = write_checkpoint(tmp_path / "good", replace(TIED, shards=4))
    bad = write_checkpoint(tmp_path / "bad", replace(TIED, shards=4))
    os.truncate(bad / "model-00004-of-00004.safetensors", 100)
    before = sorted(os.listdir("/proc/self/fd"))
    _load(good)
    with pytest.raises(WeightUpdateRefused):
        _load(bad)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_beside_the_packed_copy_only_one_linear_is_held(tmp_path):
    folder = write_checkpoint(tmp_path / "c", replace(TIED, layers=12, hidden=128, inner=256))
    largest = 4 * 2 * 256 * 128  # gate and up
    tracemalloc.start()
    try:
        packed = _load(folder).nbytes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # numpy's arrays are traced, packed tensors are not: the parts, their stacked copy, and small change
    assert peak < 3 * largest < packed / 4


def test_a_damaged_header_is_refused_or_harmless_but_never_anything_else(tmp_path):
    folder, model = (
        write_checkpoint(tmp_path / "c", TIED),
        Qwen(load_config(tmp_path / "c"), ReferenceOps("float32"), 8),
    )
    path = folder / "model.safetensors"
    good, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    end = 8 + int.from_bytes(good[:8], "little")
    for _ in range(300):
        data = bytearray(good)
        for at in rng.integers(0, end, rng.integers(1, 4)):
            data[at] = rng.choice(list(b'0129{}[]",:-.eF\x00\xff'))
        path.write_bytes(data)
        try:
            with Checkpoint(folder) as checkpoint:
                checkpoint.check(model.tensor_shapes())
                for name in checkpoint.entries:
                    checkpoint.read(name)
        except WeightUpdateRefused:
            refused += 1
    assert refused > 250


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_a_tensor_that_is_not_finite_is_refused_by_name(kind, value, tmp_path):
    values = np.ones((3, 700_000), np.float32)  # the last of several pieces
    values[2, -1] = value
    stored = bfloat16_bits(values) if kind == "bfloat16" else values.astype(kind)
    write_safetensors(tmp_path / "model.safetensors", {"fine": stored[:2], "diverged": stored})
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("fine").shape == (2, 700_000)
        with pytest.raises(WeightUpdateRefused, match="diverged.* not finite"):
            checkpoint.read("diverged")
