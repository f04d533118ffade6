"""GET /ui: a page that shows the engine live, and the files and the event stream that the page reads.

The page loads nothing from other hosts. Its buttons call the routes of fastdeploy/http/control.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import InvalidField
from fastdeploy.fleet.client import FleetClient
from fastdeploy.http.guards.route_access import Access
from fastdeploy.http.ui.feed import Feed, FeedResponse

FOLDER = Path(__file__).parent
FILES = {"page.css": "text/css", "page.js": "text/javascript", "server.js": "text/javascript"}
FILES["timeline.js"] = "text/javascript"
HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
ORIGIN = re.compile(r"https?://([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
MAX_SERVERS = 16


def ui_router(client: ServingClient) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    feeds = {"": Feed(client)}
    page = (FOLDER / "index.html").read_bytes()

    @router.get("/ui")
    @Access.OPEN
    async def ui(request: Request) -> Response:
        """Answer the page. server: the origin of another server that the page shows too; may be repeated."""
        servers = request.query_params.getlist("server")
        if len(servers) > MAX_SERVERS or not all(ORIGIN.fullmatch(server) for server in servers):
            raise InvalidField("server", f"expected at most {MAX_SERVERS} origins such as http://10.0.0.2:8180")
        headers = {**HEADERS, "Content-Security-Policy": content_policy(servers)}
        return Response(page, headers=headers, media_type="text/html")

    @router.get("/ui/events")
    @Access.WATCH
    async def events(request: Request) -> Response:
        """Stream what happens. replica: of a fleet, the one to show; without it all."""
        name = request.query_params.get("replica", "")
        if name:
            if not isinstance(client, FleetClient):
                raise InvalidField("replica", "this server is not the gateway of a fleet")
            client.membership.find(name)
            feeds.setdefault(name, Feed(client, name))
        return FeedResponse(feeds[name])

    for name, media_type in FILES.items():
        _add_file(router, name, media_type)
    return router


def content_policy(servers: list[str]) -> str:
    """Return the Content-Security-Policy of the page: files and calls of this server only, and calls to ``servers``."""
    connect = " ".join(["connect-src 'self'", *servers])
    rest = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; {connect}; {rest}"


def _add_file(router: APIRouter, name: str, media_type: str) -> None:
    content = (FOLDER / name).read_bytes()

    @router.get(f"/ui/{name}")
    @Access.OPEN
    async def file() -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)
