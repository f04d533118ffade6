"""The adapter root, in which the names of unknown adapters are looked up."""

from __future__ import annotations

import functools
from collections.abc import Callable

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.errors import FastDeployError
from fastdeploy.engine.adapters.checks import AdapterChecks
from fastdeploy.engine.adapters.store import AdapterStore
from fastdeploy.engine.field_checks import adapter_not_found
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.requests.delivery import Answer
from fastdeploy.engine.staging_thread import Job, StagingThread
from fastdeploy.inter_communicator import messages as m


class AdapterLookups:
    """Begins lookups in the adapter root. thread: for all copies from there, so lookups that hang delay no other load.
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

    @handles(m.LookUpAdapterArgs)
    def look(self, args: m.LookUpAdapterArgs, answer: Answer) -> None:
        """Tell whether the root has a folder for a name. Raises the errors of :meth:`begin`."""
        name, path = args.lora_name, self._checks.path_in_root(args.lora_name)
        self.thread.check_room()

        def on_end(_: None, error: FastDeployError | None, seconds: float) -> None:
            answer({"lora_name": name, "path": path}, None if error is None else explained(error, name))

        work = functools.partial(self._store.look, path, (self._root,))
        deadline = self._clock() + self._timeout_s
        self.thread.submit(Job(args, work, on_end, self._timeout_s, reads=True, deadline=deadline))


def explained(error: FastDeployError, name: str) -> FastDeployError:
    """Return the error of a lookup: a name without a folder is that of no adapter."""
    return adapter_not_found(name) if error.detail.get("param") == "lora_path" else error
