"""Writing and reading of the embedded model's checkpoint folder: Hugging Face format, weights in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import paddle

from examples.embedded_model import tokenizer
from examples.embedded_model.model import ModelConfig, Qwen3

WEIGHTS = "model.safetensors"


def save(model: Qwen3, folder: Path) -> None:
    """Write config, weights (rounded to nearest-even bfloat16), generation config and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(model.config),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": tokenizer.END_ID,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": model.config.num_hidden_layers,
        "pad_token_id": tokenizer.PAD_ID,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }
    generation = {"do_sample": False, "eos_token_id": tokenizer.END_ID, "pad_token_id": tokenizer.PAD_ID}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    write_weights(folder, {name: weight.numpy() for name, weight in model.weights.items()})
    tokenizer.build(folder)


def load(folder: Path) -> Qwen3:
    """Load the model that ``save`` wrote to ``folder``, with weights in float32."""
    settings = json.loads((folder / "config.json").read_text())
    config = ModelConfig(**{field.name: settings[field.name] for field in fields(ModelConfig)})
    weights = {name: paddle.to_tensor(w, stop_gradient=False) for name, w in read_weights(folder).items()}
    return Qwen3(config, weights)


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors that ``write_weights`` wrote to ``folder``, in float32, by name."""
    raw = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        bits = np.frombuffer(raw[start:end], np.uint16).reshape(entry["shape"])
        found[name] = (bits.astype(np.uint32) << 16).view(np.float32)
    return found


def _to_bf16(array: np.ndarray) -> np.ndarray:
    """Round float32 to the upper 16 bits, to nearest even (weights are finite)."""
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def write_weights(folder: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Round float32 tensors to bfloat16 and write them in the safetensors layout: header length, JSON header padded to
    8 bytes, data."""
    arrays = {name: _to_bf16(weight) for name, weight in weights.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in arrays.items():
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(array.tobytes() for array in arrays.values())
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
