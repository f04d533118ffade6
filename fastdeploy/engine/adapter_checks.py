"""Checks of adapter names and of the fields of a load, before any file is touched."""

from __future__ import annotations

import os
from collections.abc import Callable

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.errors import InvalidField, ModelNotFound, VersionConflict
from fastdeploy.core.safe_files import path_problem
from fastdeploy.core.scope import BASE_NAMES, MAX_LORA_NAME_CHARS
from fastdeploy.core.source_policy import SourcePolicy
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.weight_checks import MAX_EPOCH, check_kv, check_label, check_seconds
from fastdeploy.inter_communicator.messages import LoadAdapterArgs


class AdapterChecks:
    """The rules of one engine. is_copy: whether a path is that of a copy that another engine keeps."""

    def __init__(self, config: EngineConfig, policy: SourcePolicy, is_copy: Callable[[str], bool]):
        self._config, self._policy, self._is_copy = config, policy, is_copy

    def check_load(self, args: LoadAdapterArgs) -> float:
        """Check the fields of a load. Return its time-out. Raises InvalidField."""
        self._check_name(args.lora_name)
        check_label("version", args.version)
        check_kv(args.kv)
        timeout_s = self._config.stage_timeout_s if args.timeout_s is None else args.timeout_s
        check_seconds("timeout_s", timeout_s)
        if (args.config is None) != isinstance(args.source, FolderSource):
            raise InvalidField("config", "expected the content of adapter_config.json, and only without a folder")
        if not (isinstance(args.source, FolderSource) and self._is_copy(args.source.path)):
            self._policy.check(args.source, "lora_path")
        return timeout_s

    def path_in_root(self, name: str) -> str:
        """Return the folder in which an unknown name is looked up. Raises ModelNotFound for a name that cannot be one.
        A link that leads out of the root is refused when the folder is opened."""
        path = os.path.join(self._config.adapter_root, name)
        try:
            self._check_name(name)
        except InvalidField as error:
            raise not_found(name) from error
        if not {"", ".", ".."}.isdisjoint(name.split("/")) or path_problem(path) is not None:
            raise not_found(name)
        return path

    def _check_name(self, name: str) -> None:
        if not 1 <= len(name) <= MAX_LORA_NAME_CHARS:
            raise InvalidField("lora_name", f"expected 1 to {MAX_LORA_NAME_CHARS} characters, got {len(name)}")
        if name != name.encode("utf-8", "replace").decode():
            raise InvalidField("lora_name", "expected text that UTF-8 can encode, got half of a surrogate pair")
        if name in (*BASE_NAMES, self._config.served_model_name, self._config.model):
            raise InvalidField("lora_name", f"expected another name than those of the base model, got {name!r}")


def check_adapter_epoch(adapter_epoch: int | None, serves: int) -> None:
    """Raise an error unless ``adapter_epoch`` is None, or above that of the adapter that has the name (0 = none)."""
    if adapter_epoch is not None and adapter_epoch > MAX_EPOCH:
        raise InvalidField("adapter_epoch", f"expected an integer up to 2**53 - 1, got {adapter_epoch}")
    if adapter_epoch is not None and adapter_epoch <= serves:
        why = f"adapter_epoch: expected a number above {serves}, got {adapter_epoch}"
        raise VersionConflict(why, adapter_epoch=serves)


def not_found(name: str, field: str = "model") -> ModelNotFound:
    """Return the error for an unknown name, in the field of this name."""
    return ModelNotFound(f"{field}: there is no adapter {name!r}", param=field)
