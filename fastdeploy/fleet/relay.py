"""A request of the fleet: its outputs come from one replica, and from another one if that replica is lost."""

from __future__ import annotations

from fastdeploy.client.request_stream import Reader, RequestStream


class Attempt(Reader):
    """Reads the stream of one replica, and passes its outputs on to the stream of the request."""

    def __init__(self, outer: RequestStream):
        super().__init__(outer.reader.for_tokens)
        self._outer = outer

    def wake(self, stream: RequestStream | None = None) -> None:
        if stream is None:
            return
        try:
            outputs = stream.take()
        except Exception as error:
            self._outer.fail(error)
            return
        for output in outputs:
            self._outer.put(output)
        self._outer.reader.wake(self._outer)
