"""Checkpoints that are made: the shapes of Qwen2.5, adapters, and slightly changed copies."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from benchmarks import make_adapters, make_model
from benchmarks.lib.random_tensors import RandomTensor, write_random_tensors
from benchmarks.lib.roofline import Shape
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.model_executor.models import build_model, parse_config
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.testing.tensors import perturbed_copy, to_bfloat16

Q05 = Shape(hidden=896, inner=4864, layers=24, heads=14, kv_heads=2, head_dim=64, vocab=151936)


def test_an_adapter_has_both_matrices_of_every_linear_of_every_layer():
    sizes = {tensor.name: tensor.shape for tensor in make_adapters.tensors(Q05, 16)}
    assert len(sizes) == 24 * 7 * 2
    assert sum(rows * columns for rows, columns in sizes.values()) == 8_798_208
    base = "base_model.model.model.layers.23.self_attn.k_proj"
    assert (sizes[f"{base}.lora_A.weight"], sizes[f"{base}.lora_B.weight"]) == ((16, 896), (128, 16))


@pytest.mark.slow
def test_peft_reads_the_folder_and_the_seeds_differ(tmp_path: Path):
    import peft

    assert make_adapters.main([str(MODEL_DIR), str(tmp_path), "--count", "2", "--rank", "3"]) == 0
    folders = [tmp_path / "adapter-0", tmp_path / "adapter-1"]
    config = peft.PeftConfig.from_pretrained(str(folders[0]))
    assert (config.peft_type, config.r, config.lora_alpha) == (peft.PeftType.LORA, 3, 6)
    assert config.target_modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    files = [folder / "adapter_model.safetensors" for folder in folders]
    with safe_open(str(files[0]), "numpy") as file:
        names = set(file.keys())
    assert names == {tensor.name for tensor in make_adapters.tensors(Shape.of(MODEL_DIR), 3)}
    assert files[0].read_bytes() != files[1].read_bytes()


@pytest.mark.parametrize(
    ("shape", "count", "kv_rows"),
    [("q05", 494_032_768, 128), ("q15", 1_543_714_304, 256), ("q3", 3_085_938_688, 256)],
)
def test_the_shapes_have_as_many_parameters_as_qwen2_5(shape: str, count: int, kv_rows: int):
    config = make_model.config_of(shape)
    sizes = {tensor.name: tensor.shape for tensor in make_model.tensors(config)}
    assert sum(map(math.prod, sizes.values())) == count
    assert "lm_head.weight" not in sizes
    assert sizes["model.layers.0.self_attn.k_proj.weight"] == (kv_rows, config["hidden_size"])


def test_a_mixture_has_the_tensors_and_the_sizes_of_qwen3_moe(tmp_path: Path):
    config = make_model.config_of("moe")
    sizes = {tensor.name: tensor.shape for tensor in make_model.tensors(config)}
    expert, embedding = 3 * 1024 * 384, 32768 * 1024
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = Shape.of(tmp_path)
    assert shape.step_bytes(1) == 2 * (shape.layer_parameters + embedding) == 635_961_344
    norms = 20 * 2 * (1024 + 128) + 1024
    every = shape.layer_parameters + 20 * 56 * expert + 2 * embedding + norms
    assert sum(map(math.prod, sizes.values())) == every == 1_672_787_968
    assert sizes["model.layers.19.mlp.experts.63.down_proj.weight"] == (1024, 384)
    model = build_model(parse_config(config), ReferenceOps("bfloat16"), 128)
    assert sizes == {name: shape for parameter in model.parameters for name, shape in parameter.shapes.items()}


def test_the_tokenizer_is_byte_level(tmp_path: Path):
    make_model.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Größe: 12 µm\n\t<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert ids == [*text.removesuffix("<|im_end|>").encode(), 259]
    assert tokenizer.decode(ids[:-1]) == text.removesuffix("<|im_end|>")


TENSORS = [RandomTensor("a", (3, 500), 0.0, 0.1), RandomTensor("b.weight", (1000,), 1.0, 0.01)]


def test_the_file_is_read_by_safetensors_and_the_seed_fixes_every_byte(tmp_path: Path):
    paths = [tmp_path / name for name in ("x", "y", "z")]
    counts = [write_random_tensors(path, TENSORS, seed) for path, seed in zip(paths, (0, 0, 1), strict=True)]
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    assert counts == [2500] * 3
    with safe_open(str(paths[0]), "numpy") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    assert {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in found.items()} == {
        tensor.name: (tensor.shape, "BF16") for tensor in TENSORS
    }


def test_bfloat16_rounds_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159265, 0.0], np.float32)
    back = (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    assert back.tolist() == [1.0, 1.0, 1.015625, -3.140625, 0.0]


def test_every_weight_of_a_copy_moves_a_little_and_the_source_stays(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    weights = {"a": np.linspace(1, 2, 64, dtype=np.float32).reshape(8, 8), "b": np.ones(5, np.float32)}
    save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    perturbed_copy(source, tmp_path / "target", 0.01)
    after = load_file(tmp_path / "target" / "model.safetensors")
    assert (tmp_path / "target" / "config.json").read_text() == "{}"
    for name, old in weights.items():
        assert np.array_equal(load_file(source / "model.safetensors")[name], old)
        assert not np.array_equal(after[name], old) and np.abs(after[name] / old - 1).max() < 0.06
