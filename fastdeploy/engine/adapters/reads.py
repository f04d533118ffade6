"""Reads of adapters from the store, and what the runner holds of them."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.request import ServedModel
from fastdeploy.core.runner import AdapterInfo, AdapterStaging, Runner
from fastdeploy.engine.adapters.store import AdapterStore
from fastdeploy.engine.staging_thread import Job, StagingThread
from fastdeploy.scheduler.scheduler import Scheduler

log = logging.getLogger("fastdeploy.engine")

Packed = tuple[AdapterInfo, Any]
OnRead = Callable[[Packed | None, FastDeployError | None, float], None]


class AdapterReads:
    """The reads that pack adapters of the store at the runner: one new adapter at a time, and one that was evicted
    beside it. So a request for an evicted adapter does not wait for all loads.

    timeout_s: seconds that the read of an evicted adapter may take."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        store: AdapterStore,
        wake: Callable[[], None],
        clock: Callable[[], float],
        timeout_s: float,
    ):
        self._runner = runner
        self._scheduler = scheduler
        self._memory = scheduler.adapters
        self._room = scheduler.adapter_room
        self._store = store
        self._timeout_s = timeout_s
        self._loaded = StagingThread(wake, clock)
        self._evicted = StagingThread(wake, clock)
        self.threads = (self._loaded, self._evicted)

    def read(self, number: int, owner: object, timeout_s: float, deadline: float, on_read: OnRead) -> None:
        """Read and pack the copy of a load. ``on_read`` gets the result, and must commit or discard it. deadline: of
        the load, which began ``timeout_s`` before."""
        self._loaded.submit(self._job(number, owner, timeout_s, on_read, deadline))

    def _job(self, number: int, owner: object, timeout_s: float, on_read: OnRead, deadline: float = math.inf) -> Job:
        work = functools.partial(_read, self._runner.begin_adapter(), self._store.path(number))
        return Job(owner, work, on_read, timeout_s, reads=False, discard=self.discard, deadline=deadline)

    def discard(self, packed: Packed) -> None:
        """Free an adapter that was packed, but is not wanted."""
        self._runner.discard_adapter(packed[1])

    def commit(self, model: ServedModel, packed: Packed) -> None:
        """Give the runner an adapter under the number that ``model`` serves. While the weights sleep, only an adapter
        that requests in the batch use stays in memory."""
        self._runner.commit_adapter(model.served.adapter, packed[1])
        self._room.committed(model, keep="weight" not in self._runner.asleep)

    def remove_copy(self, number: int) -> None:
        """Remove the copy of a load, beside the steps."""
        work = functools.partial(self._store.remove, number)
        self._loaded.submit(Job(None, work, lambda *_: None, self._timeout_s, reads=False))

    def serve_memory(self) -> None:
        """Free what the last plan has evicted, and begin the reads that the plan has asked for."""
        memory = self._memory
        if memory.to_drop:
            self._runner.drop_adapters(memory.to_drop)
            memory.to_drop = []
        if memory.to_read:
            models, memory.to_read = memory.to_read, []
            for model in models:
                if memory.reads(model):  # else it was replaced or freed meanwhile
                    self._read_again(model)

    def free_memory(self) -> int:
        """Free the adapters that no request in the batch uses, when the weights go to sleep. Return their bytes."""
        nbytes = self._memory.forget_unused()
        self.serve_memory()
        return nbytes

    def _read_again(self, model: ServedModel) -> None:
        number = model.served.adapter

        def on_read(packed: Packed | None, error: FastDeployError | None, seconds: float) -> None:
            # Not if the adapter was replaced meanwhile, or was unloaded and its last request has ended.
            wanted = self._memory.reads(model) and model.served.adapter == number
            if packed is not None and wanted:
                self.commit(model, packed)
            elif packed is not None:
                self.discard(packed)
            elif wanted:
                why = error.message if error is not None else "no result"
                log.error("adapter %r cannot be read again: %s", model.served.adapter_name, why)
                message = f"adapter {model.served.adapter_name!r} was evicted, and cannot be read again: {why}"
                self._scheduler.adapter_failed(model, message)

        self._evicted.submit(self._job(number, model, self._timeout_s, on_read))


def _read(staging: AdapterStaging, path: str) -> Packed:
    return staging.read(path), staging.finish()
