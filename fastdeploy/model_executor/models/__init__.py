"""The architectures by their name in config.json, and reading of a config from a folder."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from pathlib import Path
from typing import Any

from fastdeploy.core.config import QUANTIZATIONS
from fastdeploy.core.errors import InvalidField, shown
from fastdeploy.core.files import ANYWHERE, Folder
from fastdeploy.model_executor.model_config import ModelConfig, eos_ids
from fastdeploy.model_executor.models.interface import Architecture, Model
from fastdeploy.model_executor.ops.interface import Ops

CONFIG, GENERATION = "config.json", "generation_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_DIGITS = 100  # of an integer


_MODULES = tuple(importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))


def _collected(table: str) -> dict[str, Any]:
    """Return the entries of all tables of this name in the modules of this package."""
    return {name: one for module in _MODULES for name, one in getattr(module, table, {}).items()}


ARCHITECTURES: dict[str, Architecture[Any]] = _collected("ARCHITECTURES")
REFUSED: dict[str, str] = _collected("REFUSED")  # architectures near one of these, and why they are not supported


def load_config(path: str | Path) -> ModelConfig:
    """Read the config of the folder ``path``. Raises InvalidField, which names the key or the file that is missing,
    malformed or not supported."""
    try:
        folder = Folder(path, ANYWHERE)
    except OSError as error:
        raise InvalidField(CONFIG, f"cannot be read: the folder {str(path)!r}: {error.strerror}") from error
    with folder:
        return read_config(folder)


def read_config(folder: Folder) -> ModelConfig:
    """Read the config of an open folder; see :func:`load_config`."""
    raw = read_json(folder, CONFIG)
    return parse_config(raw, read_json(folder, GENERATION) if folder.has(GENERATION) else {})


def read_eos_token_ids(folder: Folder) -> tuple[int, ...] | None:
    """Return the EOS ids of the folder's generation_config.json; None if it names none. Raises InvalidField."""
    value = read_json(folder, GENERATION).get("eos_token_id")
    return None if value is None else eos_ids(value)


def parse_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Make a config from config.json and generation_config.json, both parsed. Raises InvalidField."""
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise InvalidField("architectures", f"expected a list of one name, got {shown(names)}")
    if names[0] in REFUSED:
        raise InvalidField("architectures", f"{names[0]} {REFUSED[names[0]]}")
    if names[0] not in ARCHITECTURES:
        raise InvalidField("architectures", f"expected one of {', '.join(ARCHITECTURES)}, got {shown(names[0])}")
    config: ModelConfig = ARCHITECTURES[names[0]].read_config(raw, generation or {})
    return config


def build_model(config: ModelConfig, ops: Ops, max_model_len: int, quantization: str | None = None) -> Model:
    """Make the model of a config. max_model_len: the longest sequence, in tokens. quantization: of its linears, "int8"
    or None. Raises InvalidField for a quantization that is unknown, or that the ops do not have."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise InvalidField("quantization", f"expected one of {', '.join(QUANTIZATIONS)}, got {quantization!r}")
    if quantization is not None and ops.dtype != "bfloat16":
        raise InvalidField("quantization", f"{quantization} needs the dtype bfloat16, got {ops.dtype}")
    model = ARCHITECTURES[config.architecture].build(config, ops, max_model_len)
    model.quantization = quantization
    return model


def read_json(folder: Folder, file: str) -> dict[str, Any]:
    """Return the JSON object of a config file. Raises InvalidField, which names the file."""
    try:
        value = json.loads(folder.read(file, MAX_CONFIG_BYTES), parse_int=_integer)
    except OSError as error:
        raise InvalidField(file, f"cannot be read in {folder.path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidField(file, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidField(file, "expected a JSON object")
    return value


def _integer(digits: str) -> int | float:
    """Return an integer, and infinity for one that no field takes: the check of the field refuses it by its name."""
    return int(digits) if len(digits) <= MAX_DIGITS else math.inf
