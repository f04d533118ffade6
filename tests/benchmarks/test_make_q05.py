from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks import make_q05


def test_the_shape_is_that_of_qwen2_5_0_5b():
    sizes = {tensor.name: int(np.prod(tensor.shape)) for tensor in make_q05.tensors(make_q05.CONFIG)}
    assert sum(sizes.values()) == 494_032_768
    assert len(sizes) == 290
    assert "lm_head.weight" not in sizes
    assert sizes["model.layers.23.self_attn.k_proj.weight"] == 128 * 896


def test_the_tokenizer_is_byte_level(tmp_path: Path):
    make_q05.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Größe: 12 µm\n\t<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert ids == [*text.removesuffix("<|im_end|>").encode(), 259]
    assert tokenizer.decode(ids[:-1]) == text.removesuffix("<|im_end|>")
