"""A bound on the connections of a listening TCP address, whoever makes them.

ZMQ accepts every connection, and keeps one that says nothing until the time for its handshake has passed. Where the
process has no more open files, ZMQ fails to accept, tries again at once, and uses a whole core. So the listening socket
gets a filter while there are as many connections as allowed: the kernel then drops each request for another one, and
the peer tries again later.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import socket
import struct
import threading
import time
import uuid
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)
MAX_CONNECTIONS = 256
PART_OF_FILES = 4  # at most this part of the files that the process may open
# Connections that the kernel has made and ZMQ has not accepted yet. They are accepted though the limit is reached.
BACKLOG = 16
WARN_S = 60.0  # between two warnings
# Of Linux. The filter is one instruction, "return 0": it keeps no byte of a packet.
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
BPF_RETURN = 0x06
EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class ConnectionLimit:
    """The limit of open TCP connections: it counts those of ``listener`` on a thread of its own, and refuses others
    while there are ``max_open``. Must be made before ``listener`` is bound to its TCP address, of which there is only
    one."""

    def __init__(self, context: zmq.Context[Any], listener: zmq.Socket[Any]):
        self.max_open = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // PART_OF_FILES)
        self.is_reached = False
        self._listener = listener
        self._open = 0
        self._fd = -1  # of the socket that listens
        self._warned = -WARN_S
        listener.setsockopt(zmq.BACKLOG, BACKLOG)
        address = f"inproc://connections-{uuid.uuid4().hex}"
        listener.monitor(address, EVENTS)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # else ZMQ's own thread would wait for this one
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)
        self._thread = threading.Thread(target=self._run, name="fleet-connections", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop counting. Call this before the listener is closed, on the listener's thread."""
        self._listener.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        while (event := parse_monitor_message(self._events.recv_multipart()))["event"] != zmq.EVENT_MONITOR_STOPPED:
            if not event["endpoint"].startswith(b"tcp://"):
                continue  # an API server on the unix socket
            if event["event"] == zmq.EVENT_LISTENING:
                self._fd = event["value"]
                continue
            self._open += 1 if event["event"] == zmq.EVENT_ACCEPTED else -1
            if self.is_reached is not (self._open >= self.max_open):
                self._switch()
        self._events.close()

    def _switch(self) -> None:
        reached = not self.is_reached
        if reached and time.monotonic() - self._warned >= WARN_S:
            self._warned = time.monotonic()
            logger.warning(
                "the fleet endpoint has %d connections: more have to wait until some of them end", self._open
            )
        try:
            with socket.socket(fileno=os.dup(self._fd)) as listening:
                if reached:
                    _drop_all(listening)
                else:
                    listening.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        except OSError as error:
            logger.error("the connections to the fleet endpoint cannot be bounded on this system: %s", error)
        self.is_reached = reached


def _drop_all(listening: socket.socket) -> None:
    """Let the kernel drop every packet for a socket that listens. The connections that it has made are not changed."""
    code = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(code)))
