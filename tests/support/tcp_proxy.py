"""A TCP proxy that stalls, breaks connections, and counts bytes."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """A TCP proxy at ``address``, before 127.0.0.1:``port``. While it does not ``flow``, it passes nothing on.
    ``received`` counts the bytes that clients have sent, ``answered`` those that they get. break_at: once so many bytes
    were received, all connections break, and nobody can connect any more."""

    def __init__(self, port: int, address: str):
        self._target = port
        self._listener = socket.create_server((address, 0))
        self.port = self._listener.getsockname()[1]
        self.received = self.answered = 0
        self.break_at = float("inf")
        self.flows = threading.Event()
        self.flows.set()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the engine restarts
                client.close()
                continue
            self._open |= {client, server}
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                self.flows.wait()
                self.received += len(data) if counts else 0
                self.answered += 0 if counts else len(data)
                if self.received >= self.break_at:
                    self.close()
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # a close would wait for the other thread, which reads
            end.close()

    def cut(self) -> None:
        """Break all open connections."""
        for end in list(self._open):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._open.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else a thread that accepts keeps it open
        self._listener.close()
        self.flows.set()
        self.cut()
