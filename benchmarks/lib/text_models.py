"""Checkpoints whose steps cost what those of q05 cost, and whose text is not random, so that speculation has something
to predict: the embedded model made larger, and a model that copies a text with edits."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.make_model import config_of
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing.tensors import WEIGHTS, float32_tensors, head, to_bfloat16

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
REST = 0.02  # standard deviation of weights that change nothing
FOLLOWS = 22.0  # logit of a token that follows for certain; the others have about 0
EDITED_ONE_IN = 10  # lines

Values = Callable[[str, tuple[int, ...]], np.ndarray]


def write_large_embedded(folder: Path) -> None:
    """Write the embedded model with the sizes of q05. The text is the same but for rounding: new dimensions, heads and
    inner rows are 0, and new layers add 0."""
    small = json.loads((MODEL_DIR / "config.json").read_text())
    config, own = _large(small), float32_tensors(MODEL_DIR)
    hidden, size = small["hidden_size"], small["head_dim"]
    shared = small["num_attention_heads"] // small["num_key_value_heads"]  # heads of one KV head
    apart = config["num_attention_heads"] // config["num_key_value_heads"]
    firsts = [(i // shared * apart + i % shared) * size for i in range(small["num_attention_heads"])]
    of_heads = np.concatenate([np.arange(first, first + size) for first in firsts])

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in own:
            return _silent(name, shape)
        old, new = own[name], np.zeros(shape, np.float32)
        if name.endswith("q_proj.weight"):
            new[of_heads, :hidden] = old
        elif name.endswith("o_proj.weight"):
            new[:hidden, of_heads] = old
        elif old.ndim == 2:
            new[: old.shape[0], : old.shape[1]] = old
        elif old.shape == shape:
            return old
        else:  # an RMSNorm divides by the mean of all dimensions
            new[:hidden] = old * math.sqrt(hidden / config["hidden_size"])
        if name == "model.embed_tokens.weight":  # the last dimension keeps the new tokens from being drawn
            new[:, -1] = np.where(np.arange(len(new)) < len(old), 0.5, -0.5)
        if name == "model.norm.weight":
            new[-1] = 1000.0
        return new

    _write(folder, config, values)


def write_editor(folder: Path, lines: Sequence[Sequence[int]]) -> None:
    """Write a model that goes through ``lines`` in order, in a circle. One line in EDITED_ONE_IN is followed by another
    one than in the text. Each token id stands in one place of one line. The model sees only the last token."""
    follows: dict[int, dict[int, float]] = {}
    for i, line in enumerate(lines):
        follows |= {token: {after: 1.0} for token, after in zip(line, line[1:], strict=False)}
        others = random.Random(i).sample([j for j in range(len(lines)) if j != (i + 1) % len(lines)], 3)
        ends = {lines[j][0]: 1 / EDITED_ONE_IN / 3 for j in others}
        follows[line[-1]] = ends | {lines[(i + 1) % len(lines)][0]: 1 - 1 / EDITED_ONE_IN}
    config = _large(json.loads((MODEL_DIR / "config.json").read_text())) | {"tie_word_embeddings": False}
    signs = np.sign(np.random.default_rng(1).standard_normal((config["vocab_size"], config["hidden_size"]), np.float32))

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "model.embed_tokens.weight":
            return signs * REST
        if name == "model.norm.weight":
            return np.ones(shape, np.float32)
        if name != "lm_head.weight":
            return _silent(name, shape)
        rows = np.zeros(shape, np.float32)
        for token, chances in follows.items():
            for after, chance in chances.items():
                rows[after] += signs[token] * (FOLLOWS + math.log(chance)) / shape[1]
        return rows

    _write(folder, config, values)


def _large(small: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the sizes of q05, and otherwise that of the embedded model."""
    large = config_of("q05")
    chosen = {key: large[key] for key in (*SIZES, "vocab_size", "max_window_layers")}
    return {**small, **chosen}


def _silent(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a weight of a layer that adds 0."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return np.zeros(shape, np.float32)
    return np.random.default_rng(len(name)).standard_normal(shape, np.float32) * REST


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Qwen3 checkpoint."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    embedding = (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embedding, "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = embedding
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        shapes |= {f"{base}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{base}self_attn.{x}_norm.weight": (size,) for x in "qk"}
        shapes |= {f"{base}self_attn.{x}_proj.weight": (kv_heads, hidden) for x in "kv"}
        shapes |= {f"{base}self_attn.q_proj.weight": (heads, hidden), f"{base}self_attn.o_proj.weight": (hidden, heads)}
        shapes |= {f"{base}mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
        shapes[f"{base}mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def _write(folder: Path, config: Mapping[str, Any], values: Values) -> None:
    """Write the checkpoint, with the tokenizer of the embedded model."""
    folder.mkdir(parents=True)
    shapes = _shapes(config)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(head((name, "BF16", shape, 2 * math.prod(shape)) for name, shape in shapes.items()))
        for name, shape in shapes.items():
            file.write(to_bfloat16(values(name, shape)).tobytes())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL_DIR / name, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
