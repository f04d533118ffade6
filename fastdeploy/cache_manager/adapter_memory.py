"""The packed adapters in memory: which ones, their bytes, and which are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fastdeploy.core.request import Request, ServedModel


@dataclass(eq=False)
class Place:
    """The memory of one adapter.

    number: the number by which the runner knows the adapter; 0 while the adapter is read. num_users: requests in the
    batch that use it. wanted_by: the request that the adapter is read for, until a request uses it. Until then, no load
    evicts it."""

    model: ServedModel
    nbytes: int
    number: int = 0
    num_users: int = 0
    wanted_by: Request | None = None


class AdapterMemory:
    """The account of the adapters at the runner, in at most ``budget`` bytes. Only an adapter that is replaced by a
    larger one while requests use it may exceed the budget.

    to_read: adapters that a request waits for, whose memory is reserved and whose read has not begun. to_drop: numbers
    that the runner must free. num_users: requests in the batch that use an adapter. num_evictions, num_reads: since the
    start."""

    def __init__(self, budget: int):
        self.budget = budget
        self.nbytes = 0
        self.num_users = 0
        self.num_evictions = 0
        self.num_reads = 0
        self.to_read: list[ServedModel] = []
        self.to_drop: list[int] = []
        self._places: dict[ServedModel, Place] = {}  # the least recently used first

    def __len__(self) -> int:
        return sum(place.number > 0 for place in self._places.values())

    def has(self, model: ServedModel) -> bool:
        """Whether the runner has the adapter."""
        place = self._places.get(model)
        return place is not None and place.number > 0

    def reads(self, model: ServedModel) -> bool:
        """Whether the adapter is being read, or is about to be."""
        place = self._places.get(model)
        return place is not None and not place.number

    def is_used(self, model: ServedModel) -> bool:
        """Whether a request in the batch uses the adapter."""
        place = self._places.get(model)
        return place is not None and place.num_users > 0

    def victims(self, nbytes: int, may_go: Callable[[Place], bool]) -> list[ServedModel] | None:
        """Return the adapters to evict, the least recently used first, so that ``nbytes`` more have room. None if that
        cannot be. Changes nothing."""
        victims: list[ServedModel] = []
        missing = self.nbytes + nbytes - self.budget
        for place in self._places.values():
            if missing <= 0:
                break
            if place.number and may_go(place):
                victims.append(place.model)
                missing -= place.nbytes
        return victims if missing <= 0 else None

    def evict(self, model: ServedModel) -> None:
        """Free an adapter, if it is in memory, that no request in the batch uses. The adapter can be read again."""
        self.num_evictions += model in self._places
        self.forget(model)

    def reserve(self, model: ServedModel, request: Request) -> None:
        """Reserve the memory of an adapter that ``request`` needs, and ask for the read. The caller has made room."""
        assert model.nbytes is not None and model not in self._places
        self._places[model] = Place(model, model.nbytes, wanted_by=request)
        self.nbytes += model.nbytes
        self.num_reads += 1
        self.to_read.append(model)

    def put(self, model: ServedModel) -> None:
        """Record that the runner has the adapter under its number, perhaps besides the one that it replaces."""
        assert model.nbytes is not None and model.served.adapter
        place = self._places.setdefault(model, Place(model, 0))
        self.nbytes += model.nbytes - place.nbytes
        if place.number:
            self.to_drop.append(place.number)
        place.nbytes, place.number = model.nbytes, model.served.adapter
        self._touch(place)

    def forget(self, model: ServedModel) -> None:
        """Free an adapter, or end its reservation."""
        if (place := self._places.pop(model, None)) is None:
            return
        assert not place.num_users
        self.nbytes -= place.nbytes
        if place.number:
            self.to_drop.append(place.number)

    def forget_unused(self) -> int:
        """Free all adapters that no request in the batch uses. Return their bytes."""
        unused = [place for place in self._places.values() if place.number and not place.num_users]
        for place in unused:
            self.forget(place.model)
        return sum(place.nbytes for place in unused)

    def use(self, model: ServedModel) -> None:
        """Record that a request which uses the adapter has joined the batch."""
        place = self._places[model]
        place.num_users += 1
        place.wanted_by = None
        self.num_users += 1

    def leave(self, model: ServedModel) -> None:
        """Record that such a request has left the batch."""
        place = self._places[model]
        place.num_users -= 1
        self.num_users -= 1
        self._touch(place)
        if self.nbytes > self.budget and not place.num_users:
            self.evict(model)

    def _touch(self, place: Place) -> None:
        """Make the adapter the most recently used one."""
        self._places[place.model] = self._places.pop(place.model)

    def models(self) -> set[ServedModel]:
        """Return the adapters that have memory."""
        return set(self._places)

    def numbers(self) -> set[int]:
        """Return the numbers of the adapters at the runner, with those that it must free."""
        return {place.number for place in self._places.values() if place.number} | set(self.to_drop)

    def check_integrity(self, batch: Iterable[Request]) -> None:
        """Assert that the counts are right. batch: requests in the batch, with the frozen ones."""
        users = [request.model for request in batch if request.scope.above is not None]
        assert self.num_users == len(users) == sum(place.num_users for place in self._places.values())
        assert self.nbytes == sum(place.nbytes for place in self._places.values())
        for model, place in self._places.items():
            assert place.model is model and place.num_users == users.count(model), model
            assert place.nbytes == model.nbytes and place.number in (0, model.served.adapter), model
            assert place.number or not place.num_users, "a request uses an adapter that is not there"
