"""Room in memory for adapters: which adapters are evicted for the adapter of the next request, or after a load."""

from __future__ import annotations

from collections.abc import Iterable

from fastdeploy.cache_manager.adapter_memory import AdapterMemory, Place
from fastdeploy.core.request import Request, ServedModel
from fastdeploy.scheduler.queue import Gate, WaitingQueue


class AdapterRoom:
    """Chooses the adapters to evict. An adapter that a request in the batch uses is evicted only if all its users are
    frozen, and those are preempted before."""

    def __init__(self, memory: AdapterMemory, waiting: WaitingQueue):
        self._memory = memory
        self._waiting = waiting

    def victims_for(self, request: Request, any_frozen: bool) -> list[ServedModel] | None:
        """Return the adapters to evict for that of ``request``, or None if they would not make enough room. Those whose
        users are all frozen are the last choice. any_frozen: whether the batch has frozen requests."""
        nbytes = request.model.nbytes
        if nbytes is None or not self._needs_room(request.model):
            return []
        victims = self._memory.victims(nbytes, _is_idle)
        return self._memory.victims(nbytes, self._is_idle_or_frozen) if victims is None and any_frozen else victims

    def read_for(self, request: Request, victims: Iterable[ServedModel]) -> None:
        """Evict ``victims``, which no request uses any more. Set ``request`` aside until its adapter is read."""
        for model in victims:
            self._memory.evict(model)
        if self._needs_room(request.model):
            self._memory.reserve(request.model, request)
        self._waiting.set_aside(request)

    def committed(self, model: ServedModel, keep: bool) -> None:
        """Record that the runner has an adapter under its number. The adapter stays if it is used, or if ``keep`` is
        set and there is room for it. Otherwise it is evicted at once."""

        def may_go(place: Place) -> bool:
            wanted = place.wanted_by is not None and place.wanted_by in self._waiting
            return place.model is not model and _is_idle(place) and not wanted

        self._memory.put(model)
        victims = self._memory.victims(0, may_go)
        for victim in victims or ():
            self._memory.evict(victim)
        if not self._memory.is_used(model) and (victims is None or not keep):
            self._memory.evict(model)
        self._waiting.take_back(model)

    def _needs_room(self, model: ServedModel) -> bool:
        """Whether an adapter must be read, and has no memory for that. Not so while its name is being looked up."""
        return model.nbytes is not None and not self._memory.has(model) and not self._memory.reads(model)

    def _is_idle_or_frozen(self, place: Place) -> bool:
        """Requests are frozen by scope, so an adapter has no other users if one of them is frozen."""
        return _is_idle(place) or self._waiting.gate_of(place.model.scope) is Gate.CLOSED


def _is_idle(place: Place) -> bool:
    return not place.num_users
