"""The table that holds all sequences in the engine."""

from __future__ import annotations

from collections.abc import Iterator

from fastdeploy.core.request import Group, Request
from fastdeploy.core.request_fields import AddRequest


class RequestTable:
    """The one table of requests, by request id. A group leaves when its last choice is retired."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._by_client_id: dict[str, list[Group]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Group) -> None:
        assert group.add.request_id not in self._groups
        self._groups[group.add.request_id] = group
        self._by_client_id.setdefault(group.client_id, []).append(group)

    def get(self, request_id: str) -> list[Request]:
        """Return the choices that are still in the engine; none for an unknown id."""
        group = self._groups.get(request_id)
        return list(group.requests) if group else []

    def id_is_in_use(self, add: AddRequest) -> bool:
        """Whether an id of ``add`` is in use: its own, or the id for clients, which only members of a group share."""
        others = self._groups if add.group else self._by_client_id
        return add.request_id in self._groups or (add.group or add.request_id) in others

    def known_as(self, client_id: str) -> list[Request]:
        """Return the choices of all requests that the client knows by this id."""
        return [r for group in self._by_client_id.get(client_id, []) for r in group.requests]

    def remove(self, request: Request) -> None:
        group = request.group
        group.requests.remove(request)
        if not group.requests:
            del self._groups[group.add.request_id]
            same = self._by_client_id[group.client_id]
            same.remove(group)
            if not same:
                del self._by_client_id[group.client_id]

    def of_client(self, client: str) -> list[Request]:
        return [r for g in self._groups.values() if g.client == client for r in g.requests]

    def __iter__(self) -> Iterator[Request]:
        return (r for g in list(self._groups.values()) for r in list(g.requests))
