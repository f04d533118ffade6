"""Random PEFT adapters over the tiny checkpoints. Needs numpy only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy.testing.checkpoints import Spec, random_tensors
from fastdeploy.testing.tensors import to_bfloat16, write_safetensors

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)
PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter to make. config: fields of adapter_config.json, beside the usual ones. ranks: the rank of each module
    that the config targets, as the test's author reads PEFT's rules; PEFT itself checks that (torch_adapters.py).
    strength: how far the adapter moves an output of about 1. dtype: of the tensors: float32, bfloat16 or float16."""

    config: dict[str, Any]
    ranks: Mapping[str, int]
    strength: float = 0.4
    seed: int = 0
    dtype: str = "float32"


def shapes_of(spec: Spec) -> dict[str, tuple[int, int]]:
    """Return [out_features, in_features] of every linear of the model that an adapter may change."""
    tensors = random_tensors(spec)
    shapes = {
        name.removesuffix(".weight"): array.shape
        for name, array in tensors.items()
        if array.ndim == 2 and name.endswith(".weight")
    }
    shapes["lm_head"] = shapes.pop("model.embed_tokens")
    return shapes


def modules(spec: Spec, *endings: str, layers: Iterable[int] | None = None) -> list[str]:
    """Return the modules whose last name is one of ``endings``, in all layers or in these."""
    chosen = range(spec.layers) if layers is None else layers
    beneath = tuple(f"model.layers.{layer}." for layer in chosen)
    return [m for m in shapes_of(spec) if m.endswith(endings) and m.startswith(beneath)]


def adapter_tensors(spec: Spec, adapter: AdapterSpec) -> dict[str, np.ndarray]:
    """Random float32 tensors by the names of PEFT. Neither A nor B is 0, unlike in an adapter that PEFT has begun."""
    rng = np.random.default_rng(adapter.seed + 1000)
    shapes, tensors = shapes_of(spec), {}
    alpha = adapter.config.get("lora_alpha", 8)
    for module, rank in adapter.ranks.items():
        rows, columns = shapes[module]
        scale = adapter.strength * rank**0.5 / alpha
        tensors[f"{PREFIX}{module}.lora_A.weight"] = rng.standard_normal((rank, columns)) * columns**-0.5
        tensors[f"{PREFIX}{module}.lora_B.weight"] = rng.standard_normal((rows, rank)) * scale
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def config_of(adapter: AdapterSpec) -> dict[str, Any]:
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", **adapter.config}


def write_adapter(
    folder: Path,
    spec: Spec,
    adapter: AdapterSpec,
    tensors: dict[str, np.ndarray] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a PEFT folder. tensors, config: in place of those of the spec."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config_of(adapter) if config is None else config))
    if tensors is None:
        store = {"float32": np.float32, "float16": np.float16, "bfloat16": None}[adapter.dtype]
        tensors = {
            name: to_bfloat16(array) if store is None else array.astype(store)
            for name, array in adapter_tensors(spec, adapter).items()
        }
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def linears_of(spec: Spec) -> tuple[str, ...]:
    """Return the last names of the linears that an adapter changes: of a mixture, those of attention alone."""
    return ATTENTION if spec.experts else ALL


def simple(spec: Spec, rank: int, *endings: str, **more: Any) -> AdapterSpec:
    """Return an adapter of these modules (by default all but the output layer), of one rank."""
    endings = endings or linears_of(spec)
    config = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(endings), **more.pop("config", {})}
    return AdapterSpec(config, dict.fromkeys(modules(spec, *endings), rank), **more)


def cases(spec: Spec) -> dict[str, AdapterSpec]:
    """Return an adapter of each kind for the model, by name."""
    names, last = linears_of(spec), spec.layers - 1
    every = modules(spec, *names)
    late = "o_proj" if spec.experts else "down_proj"
    all_linear = {"target_modules": r".*\.self_attn\..*_proj" if spec.experts else "all-linear"}
    base, more = {"r": 8, "lora_alpha": 16}, r"|mlp\.down_proj"

    def ranks(names: Iterable[str], rank: int = 8) -> dict[str, int]:
        return dict.fromkeys(names, rank)

    patterned = {m: 3 if "mlp" in m else 4 if m == "model.layers.0.self_attn.q_proj" else 8 for m in every}
    two = ["q_proj", "v_proj" if spec.experts else "up_proj"]
    chosen = modules(spec, *two, layers=[last])
    return {
        "rank1": simple(spec, 1, seed=1),
        "rank8": simple(spec, 8, seed=22, dtype="bfloat16"),
        "rank16": simple(spec, 16, seed=3, dtype="float16"),
        "rank64": simple(spec, 64, seed=4),
        "only_q_and_v": simple(spec, 8, "q_proj", "v_proj", strength=1.2, seed=5),
        "rslora": simple(spec, 16, config={"use_rslora": True, "lora_alpha": 8}, strength=0.15, seed=6),
        "rank_and_alpha_patterns": AdapterSpec(
            base
            | {
                "target_modules": list(names),
                "rank_pattern": {"model.layers.0.self_attn.q_proj": 4, r"mlp\.(gate|up|down)_proj": 3, ".*proj": 8},
                "alpha_pattern": {"layers.0.mlp.up_proj": 40, "up_proj": 2, r"v_pro.": 25},
            },
            patterned,
            seed=7,
        ),
        "regex": AdapterSpec(
            base | {"target_modules": rf"model\.layers\.\d+\.(self_attn\.(q|o)_proj{'' if spec.experts else more})"},
            ranks(m for m in every if m.endswith(("q_proj", "o_proj", "down_proj"))),
            seed=8,
        ),
        "all_linear": AdapterSpec(base | all_linear, ranks(every), seed=9),
        "all_linear_but": AdapterSpec(
            base | all_linear | {"exclude_modules": ["o_proj", "model.layers.0.mlp.up_proj"]},
            ranks(m for m in every if not m.endswith("o_proj") and m != "model.layers.0.mlp.up_proj"),
            seed=10,
        ),
        "one_layer": AdapterSpec(
            base | {"target_modules": two, "layers_to_transform": [last], "layers_pattern": "layers"},
            ranks(chosen),
            strength=1.5,
            seed=11,
        ),
        "output_layer": AdapterSpec(
            base | {"target_modules": ["lm_head", late]},
            ranks(["lm_head", *modules(spec, late)]),
            seed=12,
        ),
    }
