"""The parent's ends of the socket pairs to its gateways (see fleet/launcher.py)."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from fastdeploy.entrypoints.process_tree import PIPES
from fastdeploy.fleet.launcher import Answer, Ask, ParentEnd, Placements


class GatewayLinks:
    """One link to each gateway, by its name. selector: of the ProcessTree. handle(gateway, ask): does what a gateway
    asks for, and returns the answer; None = the answer is sent later."""

    def __init__(self, selector: selectors.BaseSelector, handle: Callable[[str, Ask], Answer | None]):
        self._selector = selector
        self._handle = handle
        self._links: dict[str, ParentEnd] = {}

    def open(self, gateway: str, end: socket.socket, placements: Placements) -> None:
        """Begin the link to a new process of a gateway, in place of the link to the one before."""
        self.close(gateway)
        link = self._links[gateway] = ParentEnd(end)
        self._selector.register(link, selectors.EVENT_READ, (PIPES, lambda: self._read(gateway, link)))
        self.send(gateway, placements)

    def close(self, gateway: str) -> None:
        if (link := self._links.pop(gateway, None)) is not None:
            self._selector.unregister(link)
            link.close()

    def rename(self, gateway: str, name: str) -> None:
        """Give the link to a gateway another name, since another process gets the name."""
        if (link := self._links.pop(gateway, None)) is not None:
            self._links[name] = link
            self._watch(name, link)

    def send(self, gateway: str, message: Placements | Answer) -> None:
        """Send a message, unless the gateway has ended."""
        if (link := self._links.get(gateway)) is not None:
            link.send(message)
            self._watch(gateway, link)

    def send_all(self, placements: Placements) -> None:
        for gateway in self._links:
            self.send(gateway, placements)

    def _read(self, gateway: str, link: ParentEnd) -> None:
        asks = link.read()
        if asks is None:
            self.close(gateway)
            return
        for ask in asks:
            if (answer := self._handle(gateway, ask)) is not None:
                self.send(gateway, answer)
        link.flush()
        self._watch(gateway, link)

    def _watch(self, gateway: str, link: ParentEnd) -> None:
        """Wait for room only while something waits for it."""
        write = selectors.EVENT_WRITE if link.wants_to_write else 0
        self._selector.modify(link, selectors.EVENT_READ | write, (PIPES, lambda: self._read(gateway, link)))
