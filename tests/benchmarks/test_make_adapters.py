from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks import make_adapters
from benchmarks.lib.roofline import Shape
from benchmarks.make_q05 import CONFIG
from fastdeploy.embedded import MODEL_DIR

Q05 = Shape(
    CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_hidden_layers"], CONFIG["num_attention_heads"],
    CONFIG["num_key_value_heads"], CONFIG["hidden_size"] // CONFIG["num_attention_heads"], CONFIG["vocab_size"],
)  # fmt: skip


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
