"""Notice of an answer that comes before the whole body of a request was sent.

httpx reads nothing while it sends. A server that refuses a large upload answers at once, drops some of the body, and
then closes the connection. The client would only see that its connection broke.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any


class EarlyReply:
    """The watch for an early answer: it ends the body of one request when the server has answered. extensions: send
    them with this request. The request must open a new connection, since httpx shows a connection only when it is
    opened. Over TLS no answer is noticed: bytes may come that are no answer."""

    def __init__(self) -> None:
        self.extensions = {"trace": self._trace}
        self._connection: Any = None

    async def _trace(self, event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._connection = info["return_value"]
        elif event == "connection.start_tls.complete":
            self._connection = None

    async def body(self, pieces: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield ``pieces``, up to the answer. Then httpcore gets the error after which it reads the answer."""
        import httpcore  # slow to import: only where a body is sent

        async for piece in pieces:
            if self._connection is not None and self._connection.get_extra_info("is_readable"):
                raise httpcore.WriteError("the server has answered")
            yield piece
