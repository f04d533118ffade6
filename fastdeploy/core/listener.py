"""Listening sockets, which processes hand to their HTTP servers."""

from __future__ import annotations

import socket

BACKLOG = 4096  # connections that wait until a server accepts them


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket. port: 0 = a free one. Raises OSError, which names the address."""
    listener = bound(host, port)
    listener.listen(BACKLOG)
    return listener


def bound(host: str, port: int, shared: bool = False) -> socket.socket:
    """Return a socket that is bound and does not listen yet. shared: other sockets of this user that say the same may
    listen there, too (SO_REUSEPORT). Raises OSError, which names the address."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a server that listens there."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
