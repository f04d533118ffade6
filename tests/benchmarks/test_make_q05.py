from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks import make_q05

SMALL = make_q05.CONFIG | {"vocab_size": 300, "hidden_size": 28, "intermediate_size": 12, "num_hidden_layers": 2}


def test_the_shape_is_that_of_qwen2_5_0_5b():
    sizes = {name: int(np.prod(shape)) for name, shape, _, _ in make_q05.tensor_shapes(make_q05.CONFIG)}
    assert sum(sizes.values()) == 494_032_768
    assert len(sizes) == 290
    assert "lm_head.weight" not in sizes
    assert sizes["model.layers.23.self_attn.k_proj.weight"] == 128 * 896


def test_the_file_is_read_by_safetensors_and_the_seed_fixes_every_byte(tmp_path: Path):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    counts = [make_q05.write_weights(path, SMALL, seed) for path, seed in zip(paths, (0, 0, 1), strict=True)]
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    with safe_open(str(paths[0]), "numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        kinds = {file.get_slice(name).get_dtype() for name in shapes}
    assert shapes == {name: shape for name, shape, _, _ in make_q05.tensor_shapes(SMALL)}
    assert kinds == {"BF16"}
    assert counts[0] == sum(int(np.prod(shape)) for shape in shapes.values())


def test_bfloat16_rounds_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159265, 0.0], np.float32)
    bits = make_q05.to_bfloat16(values)
    back = (bits.astype(np.uint32) << 16).view(np.float32)
    assert back.tolist() == [1.0, 1.0, 1.015625, -3.140625, 0.0]


def test_the_tokenizer_is_byte_level(tmp_path: Path):
    make_q05.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Größe: 12 µm\n\t<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert ids == [*text.removesuffix("<|im_end|>").encode(), 259]
    assert tokenizer.decode(ids[:-1]) == text.removesuffix("<|im_end|>")
