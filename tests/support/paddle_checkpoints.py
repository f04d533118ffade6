"""Tiny checkpoints in Paddle's layouts, of the specs of checkpoints.py."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy.testing.checkpoints import BFLOAT16, Spec, config_json, is_bfloat16, random_tensors
from fastdeploy.testing.tensors import DTYPES, to_bfloat16, write_safetensors

Tensors = dict[str, np.ndarray]
FASTDEPLOY = {"ernie4_5": "ernie", "ernie4_5_moe": "ernie", "qwen2": "qwen2"}  # prefixes of its models
EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(\w+)\.weight")


def stored(spec: Spec, tensors: Tensors) -> Tensors:
    """float32 -> the spec's dtype; bfloat16 as uint16."""
    if spec.dtype == BFLOAT16:
        return {name: to_bfloat16(a) if is_bfloat16(spec, name) else a for name, a in tensors.items()}
    return {name: array.astype(spec.dtype) for name, array in tensors.items()}


def paddle_tensors(spec: Spec, tensors: Tensors, fused: str = "", fastdeploy_names: bool = False) -> Tensors:
    """Tensors of the Hugging Face layout in Paddle's. fused: "" (q, k, v, gate, up apart), "paddle" (q, then k, then
    v) or "paddleformers" (of each key-value head its q, its k, its v). fastdeploy_names: those of FastDeploy's own
    models, which stack the experts of a layer."""
    out: Tensors = {}
    kept: tuple[str, ...] = ("e_score_correction_bias", "experts.gate_up_proj", "experts.down_proj", "_proj_bias")
    if fused == "paddleformers":
        kept += ("lm_head.weight", *(["mlp.gate.weight"] if spec.model_type == "glm4_moe" else []))
    for name, array in tensors.items():
        keep = array.ndim == 1 or name.startswith("model.embed") or name.endswith(kept)
        out[name] = array if keep else np.ascontiguousarray(array.T)
    for name in list(out) if fused else ():
        if "q_proj" in name:
            q, k, v = (out.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv")
            groups = spec.kv_heads if fused == "paddleformers" else 1
            split = (np.split(one, groups, -1) for one in (q, k, v))
            out[name.replace("q_proj", "qkv_proj")] = np.concatenate(
                [x for one in zip(*split, strict=True) for x in one], -1
            )
        elif "gate_proj" in name:
            both = [out.pop(name.replace("gate_proj", f"{x}_proj")) for x in ("gate", "up")]
            out[name.replace("gate_proj", "up_gate_proj")] = np.concatenate(both, -1)
    if fastdeploy_names:
        out = {_fastdeploy_name(spec, name): array for name, array in stacked(out).items()}
    return out


def stacked(tensors: Tensors) -> Tensors:
    """Return the tensors with the experts of each layer in one tensor, as FastDeploy's models have them."""
    experts: dict[str, list[np.ndarray]] = {}
    out: Tensors = {}
    for name, array in tensors.items():
        if found := EXPERT.fullmatch(name):
            experts.setdefault(f"{found[1]}{found[3]}_weight", []).append(array)
        else:
            out[name] = array
    return out | {name: np.stack(arrays) for name, arrays in experts.items()}


def _fastdeploy_name(spec: Spec, name: str) -> str:
    renamed = {"embed_tokens.weight": "embed_tokens.embeddings.weight", "lm_head.": "lm_head.linear."}
    for ours, theirs in (renamed | {"moe_statics.e_score_correction_bias": "experts.gate_correction_bias"}).items():
        name = name.replace(ours, theirs)
    prefix = FASTDEPLOY.get(spec.model_type)
    return f"{prefix}.{name.removeprefix('model.')}" if prefix and name.startswith("model.") else name


def paddle_config(spec: Spec, fused: str = "") -> dict[str, Any]:
    config = config_json(spec)
    config["dtype"] = config.pop("torch_dtype")
    return config | ({"paddleformers_version": "1.2.0"} if fused == "paddleformers" else {})


def write_paddle_checkpoint(
    folder: Path,
    spec: Spec,
    tensors: Tensors | None = None,
    fused: str = "",
    kind: str = "safetensors",
    fastdeploy_names: bool = False,
    files: int = 1,
    **config: Any,
) -> Path:
    """A folder in Paddle's layout. kind: of the files, "safetensors", "uint16" (safetensors that call bfloat16 U16) or
    "pdparams". files: how many; more than one have an index. config: further keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(paddle_config(spec, fused) | config))
    tensors = paddle_tensors(spec, tensors or random_tensors(spec), fused, fastdeploy_names)
    tensors = stored(spec, tensors)
    stem, ending = ("model_state", "pdparams") if kind == "pdparams" else ("model", "safetensors")
    weight_map = {}
    for number in range(files):
        part = dict(list(tensors.items())[number::files])
        file = f"{stem}.{ending}" if files == 1 else f"{stem}-{number + 1:05}-of-{files:05}.{ending}"
        weight_map |= dict.fromkeys(part, file)
        if kind == "pdparams":
            (folder / file).write_bytes(pickle.dumps(part, protocol=4))
        else:
            write_safetensors(folder / file, part, DTYPES | ({"uint16": "U16"} if kind == "uint16" else {}))
    if files > 1:
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
