"""The adapters that requests can name: loaded, replaced and unloaded by name.

A load is two jobs. The first checks the adapter's config, and copies the adapter into the engine's store, from a
folder, an upload or shared memory. The second reads the copy, and checks and packs the tensors. Then, between two
steps, the runner takes the packed adapter, and the name means the new adapter. A refused adapter changes nothing. A
prepared load waits before this last part for another call.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.errors import FastDeployError, UpdateInProgress, WrongOrder
from fastdeploy.core.events import EventKind, EventLog
from fastdeploy.core.request import ServedModel
from fastdeploy.core.runner import Runner
from fastdeploy.core.weight_source import FolderSource, SourcePolicy
from fastdeploy.engine.adapters.checks import AdapterChecks, AdapterLookups, check_adapter_epoch, explained
from fastdeploy.engine.adapters.loads import Adapter, Load, problem_of
from fastdeploy.engine.adapters.reads import AdapterReads, Packed
from fastdeploy.engine.adapters.store import AdapterStore
from fastdeploy.engine.field_checks import adapter_not_found
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.pauses.scopes import ScopeRegistry
from fastdeploy.engine.requests.delivery import Answer
from fastdeploy.engine.requests.lifecycle import RequestLifecycle
from fastdeploy.engine.staging_thread import Job, StagingThread
from fastdeploy.inter_communicator import messages as m
from fastdeploy.metrics.metrics import EngineMetrics
from fastdeploy.scheduler.scheduler import Scheduler

log = logging.getLogger("fastdeploy.engine")

COPIES_AT_ONCE = 8  # so one hung source delays nobody else


class AdapterRegistry:
    """All known adapters, by name.

    With an adapter root, a request may name an unknown adapter. The request is accepted for a model that has no weights
    yet, and is refused when the lookup finds none. In a fleet the gateway looks names up, on all replicas at once.

    clock: of the loop. wake: wakes the loop up. events: gets the commits. num_failed: loads that were refused or
    failed. past_epoch: the highest adapter_epoch of all adapters that were unloaded. A name that is loaded again begins
    above it, so no name has a number twice."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        scopes: ScopeRegistry,
        scheduler: Scheduler,
        lifecycle: RequestLifecycle,
        metrics: EngineMetrics,
        policy: SourcePolicy,
        wake: Callable[[], None],
        clock: Callable[[], float],
        events: EventLog,
    ):
        self._config, self._events = config, events
        self._scopes = scopes
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._memory = scheduler.adapters
        self._clock = clock
        self.store = AdapterStore(config.adapter_store, config.adapter_memory_mb << 20, runner.check_adapter)
        self._checks = AdapterChecks(config, policy, self.store.is_copy)
        self._copies = StagingThread(wake, clock, COPIES_AT_ONCE)
        from_root = StagingThread(wake, clock, COPIES_AT_ONCE)
        self.lookups = AdapterLookups(config, self._checks, self.store, from_root, clock)
        self.reads = AdapterReads(runner, scheduler, self.store, wake, clock, config.stage_timeout_s)
        self._threads = (self._copies, self.lookups.thread, *self.reads.threads)
        self._known: dict[str, Adapter] = {}
        self._looked_up: dict[str, ServedModel] = {}
        self._loads: dict[str, Load] = {}
        self._unloaded: dict[ServedModel, None] = {}  # which still have requests
        self._num_loads = self._num_names = 0
        self._first_expiry = math.inf  # no prepared load expires before this time, on the loop's clock
        self.num_failed = self.past_epoch = 0

    @property
    def busy(self) -> bool:
        """True while a job runs or waits."""
        return any(thread.busy for thread in self._threads)

    @property
    def num_known(self) -> int:
        return len(self._known)

    def find(self, name: str) -> ServedModel:
        """Return the adapter of this name, perhaps one that is being looked up. Raises ModelNotFound, or
        UpdateInProgress if no further lookup may start."""
        if (known := self._known.get(name)) is not None:
            return known.model
        if name not in self._looked_up:
            path = self.lookups.begin(name)
            self._looked_up[name] = self._new_model(name)
            if name not in self._loads:
                self._look_up(name, path)
        return self._looked_up[name]

    # ------------------------------------------------------------------ calls

    @handles(m.LoadAdapterArgs)
    def load(self, args: m.LoadAdapterArgs, answer: Answer) -> None:
        """Begin to load an adapter. Raises InvalidField, AdapterLoaded or UpdateInProgress."""
        args = self._checks.with_source(args)
        timeout_s = self._checks.check_load(args)
        other = self._loads.get(args.lora_name)
        if other is not None and not other.own:
            raise UpdateInProgress(f"lora_name: adapter {args.lora_name!r} is being loaded; try again after that")
        self._checks.check_replace(args, self._known.get(args.lora_name))
        if args.source.may_hang:
            (self.lookups.thread if args.lookup else self._copies).check_room()
        if other is not None:
            self._stop(other)  # a lookup; the requests that wait for it get this adapter
        self._begin(args, timeout_s, answer)

    def stop_lookups(self) -> None:
        """Look up no name of a request any more, since a gateway leads. What it has not begun is dropped."""
        if self.lookups.for_requests:
            self.lookups.for_requests = False
            self.drop_loads("dropped: a gateway leads the engine now")

    @handles(m.EndLoadArgs)
    def end_load(self, args: m.EndLoadArgs) -> dict[str, Any]:
        """Commit or drop a prepared load. A commit raises WrongOrder if there is none: a reset drops it, for example.
        After a VersionConflict or an InvalidField the load is still prepared."""
        load = self._loads.get(args.lora_name)
        if load is not None and args.fingerprint not in (None, load.fingerprint):
            load = None  # a later load: an unload between the two calls has dropped the one that was prepared before
        dropped = {"lora_name": args.lora_name, "status": "dropped"}
        if load is None and not args.commit:
            return dropped
        if load is None or load.packed is None:
            raise WrongOrder(f"lora_name: no load of adapter {args.lora_name!r} is prepared")
        if not args.commit:
            self._refuse(load, WrongOrder("the load was dropped"))
            return dropped
        known = self._known.get(args.lora_name)
        check_adapter_epoch(args.adapter_epoch, known.model.served.adapter_epoch if known is not None else 0)
        return self._commit(load, load.packed, args.adapter_epoch)

    def prepared(self) -> list[str]:
        """Return the names of the prepared loads."""
        return [name for name, load in self._loads.items() if load.packed is not None]

    def note_past_epoch(self, adapter_epoch: int) -> None:
        """Give no number up to ``adapter_epoch`` to a name that is not known."""
        self.past_epoch = max(self.past_epoch, adapter_epoch)

    @handles(m.UnloadAdapterArgs)
    def unload(self, args: m.UnloadAdapterArgs) -> dict[str, Any]:
        """Remove a name at once. Its requests finish on the weights that they have. Raises ModelNotFound."""
        adapter = self._find(args.lora_name, "lora_name")
        model = adapter.model
        del self._known[args.lora_name]
        self.note_past_epoch(model.served.adapter_epoch)
        self._give_up(args.lora_name, WrongOrder(f"lora_name: adapter {args.lora_name!r} was unloaded meanwhile"))
        self._unloaded[model] = None
        self._free_unused()
        return {
            "status": "unloaded",
            "lora_name": args.lora_name,
            "lora_int_id": adapter.int_id,
            "adapter_epoch": model.served.adapter_epoch,
            "requests_in_flight": len(model.requests),
        }

    def unload_all(self) -> list[str]:
        """Remove all names, also those that were looked up: their folders may have changed, and a request that names
        one has it looked up again. Return the names."""
        names = list(self._known)
        for name in names:
            self.unload(m.UnloadAdapterArgs(name))
        return names

    @handles(m.ExportAdapterArgs)
    def export(self, args: m.ExportAdapterArgs) -> dict[str, Any]:
        """Return where the engine's own copy of an adapter is. Raises ModelNotFound."""
        adapter = self._find(args.lora_name, "lora_name")
        path = self.store.path(adapter.model.served.adapter)
        return {**adapter.model.scope.weights_label(), "fingerprint": adapter.fingerprint, "path": path}

    @handles(m.AdaptersArgs)
    def describe_all(self, args: m.AdaptersArgs) -> dict[str, Any]:
        """Return a description of every known adapter."""
        return self.describe()

    def describe(self, limit: int | None = None) -> dict[str, Any]:
        """Return a description of every known adapter, or of the first ``limit`` ones."""
        adapters = islice(self._known.values(), limit)
        return {"adapters": [adapter.describe(self._memory.has(adapter.model)) for adapter in adapters]}

    def drop_loads(self, why: str) -> list[str]:
        """End all loads in progress. Return their names."""
        names = list(self._loads)
        for name in names:
            self._give_up(name, WrongOrder(f"lora_name: the load of adapter {name!r} was {why}"))
        return names

    # ------------------------------------------------------------------ between two steps

    def poll(self) -> None:
        """Handle the results of jobs, and free the unloaded adapters whose last request has ended."""
        for thread in self._threads:
            thread.poll()
        if self._unloaded:
            self._free_unused()
        if self._clock() >= self._first_expiry:
            self._drop_expired()

    def next_deadline(self) -> float | None:
        """Time at which ``poll`` must be called even if no message comes."""
        due = [at for thread in self._threads if (at := thread.next_deadline()) is not None]
        first = min([self._first_expiry, *due])
        return None if first == math.inf else first

    def fail(self, error: FastDeployError) -> None:
        """Answer every waiting call with ``error``, and remove the store, when the engine ends."""
        loads, self._loads = self._loads, {}
        for load in loads.values():
            load.given_up = True
            if load.answer is not None:
                load.answer({}, error)
        for thread in self._threads:
            thread.close(error)
        self.store.close()

    # ------------------------------------------------------------------ inside

    def _find(self, name: str, field: str) -> Adapter:
        if (adapter := self._known.get(name)) is None:
            raise adapter_not_found(name, field)
        return adapter

    def _begin(self, args: m.LoadAdapterArgs, timeout_s: float, answer: Answer | None) -> None:
        self._num_loads += 1
        load = Load(args, self._num_loads, timeout_s, answer, self._clock(), own=answer is None)
        self._loads[args.lora_name] = load
        work, on_end = functools.partial(self._copy, load), functools.partial(self._copied, load)
        thread = self.lookups.thread if args.lookup else self._copies
        thread.submit(Job(load, work, on_end, timeout_s, reads=args.source.may_hang, deadline=load.deadline))

    def _look_up(self, name: str, path: str) -> None:
        args = m.LoadAdapterArgs(name, FolderSource(path), path=path, lookup=True)
        self._begin(args, self._config.stage_timeout_s, None)

    def _copy(self, load: Load) -> None:
        """Copy the source, on a staging thread. A copy that came back too late is removed."""
        roots = (self._config.adapter_root,) if load.args.lookup else self._config.model_roots
        args = load.args
        self.store.copy(load.number, args.source, args.config, roots, args.fingerprint is not None)
        if load.given_up:
            self.store.remove(load.number)

    def _copied(self, load: Load, _: None, error: FastDeployError | None, seconds: float) -> None:
        load.copy_s = seconds
        if load.given_up:
            return
        if error is not None:
            self._refuse(load, error)
            return
        on_read = functools.partial(self._packed, load)
        self.reads.read(load.number, load, load.timeout_s, load.deadline, on_read)

    def _packed(self, load: Load, packed: Packed | None, error: FastDeployError | None, seconds: float) -> None:
        load.read_s = seconds
        if load.given_up:
            return
        if error is not None or packed is None:
            self._refuse(load, error or WrongOrder("no result"))
            return
        waiting = sum(other.packed[0].nbytes for other in self._loads.values() if other.packed is not None)
        if (problem := problem_of(load.args, packed[0], waiting, self._memory.budget)) is not None:
            self.reads.discard(packed)
            self._refuse(load, problem)
        elif load.args.prepare:
            load.prepared(packed, self._clock())
            self._first_expiry = min(self._first_expiry, load.expires_at)
        else:
            answer, report = load.answer, self._commit(load, packed)
            if answer is not None:
                answer(report, None)

    def _drop_expired(self) -> None:
        now = self._clock()
        for load in [load for load in self._loads.values() if load.expires_at <= now]:
            log.warning("the prepared load of adapter %r was not ended in time", load.args.lora_name)
            self._refuse(load, WrongOrder("the prepared load was not ended in time"))
        self._first_expiry = min((load.expires_at for load in self._loads.values()), default=math.inf)

    def _commit(self, load: Load, packed: Packed, adapter_epoch: int | None = None) -> dict[str, Any]:
        """Make the name mean the new adapter. Return the report. adapter_epoch: None = the next one."""
        args, info, began = load.args, packed[0], self._clock()
        del self._loads[args.lora_name]
        adapter = self._known.get(args.lora_name)
        replaced = adapter is not None
        last_epoch = self.past_epoch if adapter is None else adapter.model.served.adapter_epoch
        epoch = last_epoch + 1 if adapter_epoch is None else adapter_epoch
        if adapter is None:
            self._num_names += 1
            new = self._looked_up.pop(args.lora_name, None) or self._new_model(args.lora_name)
            adapter = self._known[args.lora_name] = Adapter(new, self._num_names)
        model, before = adapter.model, adapter.model.served
        in_flight = [request for request in model.requests if request.num_computed]
        recompute = args.kv == "recompute"
        to_recompute = sum(request.num_computed for request in in_flight) if recompute else 0
        version = args.version if args.version is not None else str(epoch)
        model.served = msgspec.structs.replace(
            before, version=version, adapter=load.number, adapter_name=args.lora_name, adapter_epoch=epoch
        )
        model.nbytes, adapter.rank, adapter.path = info.nbytes, info.rank, args.path
        adapter.fingerprint = info.fingerprint
        self._metrics.commits.labels("adapter", args.kv).inc()
        if self._events.watched:
            fields = {"version": version, "weight_epoch": before.weight_epoch, "adapter_epoch": epoch, "kv": args.kv}
            self._events.add(EventKind.COMMITTED, model.scope.id, **fields)
        if replaced:
            self._scheduler.weights_changed(model, before, recompute)
            self.reads.remove_copy(before.adapter)
        self.reads.commit(model, packed)
        return {
            "status": "loaded",
            **model.scope.weights_label(),
            "lora_int_id": adapter.int_id,
            "fingerprint": info.fingerprint,
            "rank": info.rank,
            "nbytes": info.nbytes,
            "replaced": replaced,
            "kv": args.kv,
            "requests_in_flight": len(in_flight),
            "tokens_to_recompute": to_recompute,
            "timings_ms": load.timings_ms(began, self._clock()),
        }

    def _new_model(self, name: str) -> ServedModel:
        base = self._scopes.base.served
        return self._scopes.add(msgspec.structs.replace(base, version="", adapter_name=name))

    def _refuse(self, load: Load, error: FastDeployError) -> None:
        """End a load without an adapter. Requests that wait for the name are refused, unless the adapter root may have
        the adapter."""
        name = load.args.lora_name
        if load.args.lookup:
            error = explained(error, name)
        del self._loads[name]
        self._stop(load)
        if load.answer is not None:
            self.num_failed += 1
            load.answer({}, error)
        if (model := self._looked_up.get(name)) is None:
            return
        if not load.own and model.requests and self.lookups.for_requests:
            self._look_up(name, self._checks.path_in_root(name))
            return
        del self._looked_up[name]
        self._lifecycle.refuse(model, error)
        self._scopes.remove(model)

    def _give_up(self, name: str, error: FastDeployError) -> None:
        """End the load of a name, if there is one."""
        if (load := self._loads.get(name)) is not None:
            self._refuse(load, error)

    def _stop(self, load: Load) -> None:
        """Abandon the jobs of a load, and remove its copy. A copy that is not complete is removed when it is."""
        load.given_up = True
        if load.packed is not None:
            self.reads.discard(load.packed)
        error = WrongOrder("the load was given up")
        for thread in self._threads:
            thread.give_up(load, error)
        self.reads.remove_copy(load.number)

    def _free_unused(self) -> None:
        """Free the unloaded adapters that no request needs any more."""
        for model in [model for model in self._unloaded if not model.requests]:
            del self._unloaded[model]
            self._memory.forget(model)
            self.reads.remove_copy(model.served.adapter)
            self._scopes.remove(model)

    def check_integrity(self) -> None:
        """Check that every model of an adapter is known, was unloaded, or is being looked up."""
        models = [adapter.model for adapter in self._known.values()]
        models += [*self._unloaded, *self._looked_up.values()]
        assert set(models) == set(self._scopes.adapters) and len(models) == len(set(models))
        assert self._memory.models() <= set(models), "memory of an adapter that nobody can name"
        numbers = [model.served.adapter for model in models if model.nbytes is not None]
        assert all(name in self._loads for name in self._looked_up), "a name that nobody looks up any more"
        assert len(numbers) == len(set(numbers)), "two adapters have one number"
