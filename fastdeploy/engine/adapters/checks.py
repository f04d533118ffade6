"""Checks of adapter names and of the fields of a load, and the adapter root in which unknown names are looked up."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from msgspec.structs import replace

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.errors import AdapterLoaded, FastDeployError, InvalidField, VersionConflict
from fastdeploy.core.files import path_problem
from fastdeploy.core.served_weights import BASE_NAMES, MAX_LORA_NAME_CHARS
from fastdeploy.core.weight_source import FolderSource, SourcePolicy
from fastdeploy.engine.adapters.loads import Adapter
from fastdeploy.engine.adapters.store import AdapterStore
from fastdeploy.engine.field_checks import MAX_EPOCH, adapter_not_found, check_kv, check_label, check_seconds
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.requests.delivery import Answer
from fastdeploy.engine.staging_thread import Job, StagingThread
from fastdeploy.inter_communicator.messages import LoadAdapterArgs, LookUpAdapterArgs


class AdapterChecks:
    """The rules of one engine. is_copy: whether a path is that of a copy that another engine keeps. Only a load that
    names the fingerprint may read one, as a fleet does when a replica joins. No route names it, so a client reaches
    nothing outside of --model-root."""

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
        folder = args.source.path if isinstance(args.source, FolderSource) else None
        if not args.lookup and (args.fingerprint is None or folder is None or not self._is_copy(folder)):
            self._policy.check(args.source, "lora_path")
        return timeout_s

    def check_replace(self, args: LoadAdapterArgs, known: Adapter | None) -> None:
        """Raise AdapterLoaded if the load must not replace ``known``. A load of the same folder again may always
        replace: TRL's trainers name their policies by number, and write them below their output folder. So a trainer
        that was restarted loads its names anew, and another trainer with the same names is refused."""
        if known is None or args.replace:
            return
        if not (isinstance(args.source, FolderSource) and args.path and _same_path(args.path, known.path)):
            name, before = args.lora_name, f"from {known.path!r}" if known.path else "without a folder"
            why = f"adapter {name!r} is loaded already, {before}; unload it, or call /v1/reset if this is a new run"
            raise AdapterLoaded(f"lora_name: {why}", param="lora_name")

    def with_source(self, args: LoadAdapterArgs) -> LoadAdapterArgs:
        """Return ``args`` with the source of a lookup in it. A load that names the fingerprint, as in a join, is a
        lookup if its source is the folder of one. Raises ModelNotFound as ``path_in_root`` does."""
        own = FolderSource(os.path.join(self._config.adapter_root, args.lora_name))
        if not args.lookup and (args.fingerprint is None or args.source != own):
            return args
        path = self.path_in_root(args.lora_name)
        return replace(args, source=FolderSource(path), path=path, config=None, lookup=True)

    def path_in_root(self, name: str) -> str:
        """Return the folder in which an unknown name is looked up. Raises ModelNotFound without an adapter root, and
        for a name that cannot be one. A link that leads out of the root is refused when the folder is opened."""
        if not self._config.adapter_root:
            raise adapter_not_found(name)
        path = os.path.join(self._config.adapter_root, name)
        try:
            self._check_name(name)
        except InvalidField as error:
            raise adapter_not_found(name) from error
        if not {"", ".", ".."}.isdisjoint(name.split("/")) or path_problem(path) is not None:
            raise adapter_not_found(name)
        return path

    def _check_name(self, name: str) -> None:
        if not 1 <= len(name) <= MAX_LORA_NAME_CHARS:
            raise InvalidField("lora_name", f"expected 1 to {MAX_LORA_NAME_CHARS} characters, got {len(name)}")
        if name != name.encode("utf-8", "replace").decode():
            raise InvalidField("lora_name", "expected text that UTF-8 can encode, got half of a surrogate pair")
        if name in (*BASE_NAMES, self._config.served_model_name, self._config.model):
            raise InvalidField("lora_name", f"expected another name than those of the base model, got {name!r}")


class AdapterLookups:
    """The lookups in the adapter root. thread: for all copies from there, so lookups that hang delay no other load.
    for_requests: a request that names an unknown adapter may begin one. In a fleet only a call of the gateway may,
    since all replicas must get the same adapter and number."""

    def __init__(
        self,
        config: EngineConfig,
        checks: AdapterChecks,
        store: AdapterStore,
        thread: StagingThread,
        clock: Callable[[], float],
    ):
        self._root, self._timeout_s = config.adapter_root, config.stage_timeout_s
        self._checks, self._store, self._clock = checks, store, clock
        self.thread = thread
        self.for_requests = True

    def begin(self, name: str) -> str:
        """Return the folder in which the name of a request is to be looked up. Raises ModelNotFound, or
        UpdateInProgress if no further lookup may start."""
        if self._root and not self.for_requests:
            raise adapter_not_found(name, more="; this engine belongs to a fleet, whose gateway looks names up")
        path = self._checks.path_in_root(name)
        self.thread.check_room()
        return path

    @handles(LookUpAdapterArgs)
    def look(self, args: LookUpAdapterArgs, answer: Answer) -> None:
        """Tell whether the root has a folder for a name. Raises the errors of :meth:`begin`."""
        name, path = args.lora_name, self._checks.path_in_root(args.lora_name)
        self.thread.check_room()

        def on_end(_: None, error: FastDeployError | None, seconds: float) -> None:
            answer({"lora_name": name, "path": path}, None if error is None else explained(error, name))

        work = functools.partial(self._store.look, path, (self._root,))
        deadline = self._clock() + self._timeout_s
        self.thread.submit(Job(args, work, on_end, self._timeout_s, reads=True, deadline=deadline))


def _same_path(one: str, other: str) -> bool:
    """Return whether two spellings mean one path. The file system is not read."""
    return bool(one and other) and os.path.normpath(one) == os.path.normpath(other)


def check_adapter_epoch(adapter_epoch: int | None, serves: int) -> None:
    """Raise an error unless ``adapter_epoch`` is None, or above that of the adapter that has the name (0 = none)."""
    if adapter_epoch is not None and adapter_epoch > MAX_EPOCH:
        raise InvalidField("adapter_epoch", f"expected an integer up to 2**53 - 1, got {adapter_epoch}")
    if adapter_epoch is not None and adapter_epoch <= serves:
        why = f"adapter_epoch: expected a number above {serves}, got {adapter_epoch}"
        raise VersionConflict(why, adapter_epoch=serves)


def explained(error: FastDeployError, name: str) -> FastDeployError:
    """Return the error of a lookup: a name without a folder is that of no adapter."""
    return adapter_not_found(name) if error.detail.get("param") == "lora_path" else error
