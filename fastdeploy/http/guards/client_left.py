"""Whether the client of a request still waits for the answer."""

from __future__ import annotations

from starlette.types import Receive, Scope

WATCHED = "fastdeploy.client_left"  # an ASGI extension, set by a route that wants to know of a half-closed connection


async def client_left(scope: Scope, receive: Receive) -> None:
    """Return when the client has gone. The body must have been read. A client that closes only its sending side looks
    like one that has gone, and counts as gone here."""
    scope.setdefault("extensions", {})[WATCHED] = {}
    while (await receive())["type"] != "http.disconnect":
        pass
