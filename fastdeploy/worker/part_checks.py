"""Checks of one part of an update, before any tensor is read."""

from __future__ import annotations

from collections.abc import Mapping

from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.core.files import Folder
from fastdeploy.model_executor.model_config import ModelConfig
from fastdeploy.model_executor.models import CONFIG, GENERATION, read_config, read_eos_token_ids
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, read_checksums, refuse_tensor


def check_config(folder: Folder, serving: ModelConfig, required: bool) -> None:
    """Raise WeightUpdateRefused if the folder's config describes another model, or is malformed. required: the folder
    must have a config."""
    if not required and not _has(folder, CONFIG):
        return
    try:
        config = read_config(folder)
    except InvalidField as error:
        raise _refusal(error, CONFIG) from error
    key = serving.first_difference(config)
    if key is not None:
        old, new = getattr(serving, key), getattr(config, key)
        raise WeightUpdateRefused(f"{CONFIG}: {key} is {new!r}, the serving model has {old!r}", key=key)


def eos_token_ids(folder: Folder) -> tuple[int, ...] | None:
    """Return the EOS ids that the folder's generation_config.json names; None = it names none, or is not there. Raises
    WeightUpdateRefused."""
    if not _has(folder, GENERATION):
        return None
    try:
        return read_eos_token_ids(folder)
    except InvalidField as error:
        raise _refusal(error, GENERATION) from error


def expected_checksums(reader: SafetensorsReader, given: Mapping[str, str], verify: bool) -> dict[str, str]:
    """Return the sha256 that each tensor of the source must have, where one is known. Raises WeightUpdateRefused if
    one is missing and ``verify`` is set."""
    expected = dict(given)
    for name in given:
        if name not in reader.entries:
            raise refuse_tensor(name, "has a checksum, but is not in the source")
    if verify and reader.folder is not None:
        for name, checksum in read_checksums(reader.folder).items():
            if expected.setdefault(name, checksum).lower() != checksum.lower():
                raise refuse_tensor(name, f"has another sha256 in checksums.json than in the call: {checksum}")
    for name in reader.entries:
        if verify and name not in expected:
            raise refuse_tensor(name, "has no checksum, but verify_checksum asks for one of every tensor")
    return expected


def _refusal(error: InvalidField, file: str) -> WeightUpdateRefused:
    where = "" if error.field.endswith(".json") else f"{file}: "
    return WeightUpdateRefused(where + error.message, key=error.field)


def _has(folder: Folder, name: str) -> bool:
    try:
        return folder.has(name)
    except OSError as error:
        raise WeightUpdateRefused(f"{name}: cannot be accessed: {error.strerror}", file=name) from error
