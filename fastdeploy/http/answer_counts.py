"""How many HTTP requests were answered, by method, route and status: the metric ``http_requests_total``.

All API servers of one server count together. Their parent names a folder for the counts in PROMETHEUS_MULTIPROC_DIR, in
which the Prometheus library keeps a small file for each process. So a scrape that one of them answers has the counts of
all, and those of API servers that have ended.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdeploy.core.process import ANSWER_COUNTS_FOLDER

NAME, TEXT = "http_requests_total", "HTTP requests that were answered"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})
NO_ROUTE = ""  # the path of a request that was refused before a route was found, or has none


class _AllProcesses(Collector):
    """The counts of all processes. The library forgets the text of a metric on the way."""

    def __init__(self, folder: str):
        self._collector = MultiProcessCollector(None, folder)

    def collect(self) -> list[Metric]:
        families = list(self._collector.collect())
        for family in families:
            family.documentation = TEXT
        return families


class AnswerCounts:
    """The counts of one process, and what a scrape shows. folder: of all processes; "" = this process counts alone."""

    def __init__(self, folder: str | None = None):
        self._counted = CollectorRegistry()
        self._answers = Counter(NAME, TEXT, ("method", "path", "status_code"), registry=self._counted)
        self._shown = self._counted
        if folder := os.environ.get(ANSWER_COUNTS_FOLDER, "") if folder is None else folder:
            self._shown = CollectorRegistry()
            self._shown.register(_AllProcesses(folder))

    def show(self, collector: Collector) -> None:
        """Show the metrics of ``collector``, too."""
        self._shown.register(collector)

    def add(self, scope: Scope, status: int) -> None:
        """Count one answer. A path is that of the route, with its parameters by name, so there are few of them."""
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        path = getattr(scope.get("route"), "path", NO_ROUTE)
        self._answers.labels(method, path, status).inc()

    def render(self) -> str:
        """Return the counts in Prometheus' text format."""
        return generate_latest(self._shown).decode()


class CountAnswers:
    """Middleware that counts each answer when it begins. An answer that never begins, since the client has gone, is not
    counted."""

    def __init__(self, app: ASGIApp, counts: AnswerCounts):
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def counted_send(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self._counts.add(scope, message["status"])
            return send(message)

        await self._app(scope, receive, counted_send if scope["type"] == "http" else send)
