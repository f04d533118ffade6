"""The ports of a server, at each of which several processes listen.

Each process has a socket of its own at the port (SO_REUSEPORT), and the kernel gives each new connection to one of
them. A socket that all processes share would be spread worse, since whichever process wakes up first accepts most of a
burst (docs/fleet.md has the figures).

The parent opens all sockets once, and its children inherit theirs. So no waiting connection is lost when a process is
replaced. The parent also tells the kernel which sockets get new connections, so that none waits for a process that has
died if another one serves.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
from collections.abc import Collection, Sequence

import msgspec

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.listener import BACKLOG, bound, url_of

logger = logging.getLogger(__name__)
# A classic BPF program (linux/filter.h) returns the index of the socket that gets a connection. Indexes are in the
# order of listen(). The constants are those of linux/bpf_common.h and asm-generic/socket.h.
SO_ATTACH_REUSEPORT_CBPF = 51
LOAD_WORD, MODULO, IF_EQUAL, RETURN = 0x20, 0x94, 0x15, 0x06
RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM: loads a random number


class Port:
    """One address with a listening socket for each of the processes that serve it. sockets: that of process i is at
    index i. All of them are bound to the same address."""

    def __init__(self, sockets: Sequence[socket.socket]):
        assert sockets, "nobody would listen"
        self.sockets = list(sockets)

    @classmethod
    def open(cls, host: str, port: int, num_processes: int = 1) -> Port:
        """Listen at ``port`` of ``host``; 0 = any free port. Raises OSError, also if another server of this user
        listens there with SO_REUSEPORT, since the two would take each other's connections."""
        first = bound(host, port)  # without SO_REUSEPORT, so that nobody else is there
        opened = cls([first])
        if num_processes > 1:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.listen(BACKLOG)
        for _ in range(num_processes - 1):
            other = bound(host, opened.number, shared=True)
            other.listen(BACKLOG)
            opened.sockets.append(other)
        return opened

    @property
    def number(self) -> int:
        """The number of the port."""
        return int(self.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """The URL of a server that listens here."""
        return url_of(self.sockets[0])

    def give_to(self, processes: Collection[int]) -> None:
        """Let only the sockets of these processes get new connections, each as many as the others on average. What a
        socket has got waits there for its process."""
        if len(self.sockets) == 1:
            return
        chosen = sorted(processes)
        program = [(LOAD_WORD, 0, 0, RANDOM), (MODULO, 0, 0, len(chosen))]
        for number, index in enumerate(chosen):
            program += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, index)]
        program.append((RETURN, 0, 0, chosen[0]))  # not reached
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
        struct_sock_fprog = struct.pack("HP", len(program), ctypes.addressof(code))
        try:
            self.sockets[0].setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, struct_sock_fprog)
        except OSError as error:  # older than Linux 4.6, or a sandbox that imitates Linux
            logger.warning("a new connection may wait for a process that is started again: %s", error)

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()


def open_ports(config: ServeConfig, num_processes: int = 1) -> list[Port]:
    """Open the ports of ``config``, one for each of ``ports_of``. Raises OSError."""
    opened: list[Port] = []
    try:
        for number in ports_of(config).values():
            opened.append(Port.open(config.host, number, num_processes))
    except OSError:
        for port in opened:
            port.close()
        raise
    return opened


def ports_of(config: ServeConfig) -> dict[str, int]:
    """Return the ports to listen on, by the name of the setting: that of all routes first."""
    ports = {"port": config.port, "control_port": config.control_port, "metrics_port": config.metrics_port}
    if config.metrics_port == config.port != 0:  # as FastDeploy has it: then there is no second port
        del ports["metrics_port"]
    return {name: port for name, port in ports.items() if port is not None}


def with_ports(config: ServeConfig, ports: Sequence[Port]) -> ServeConfig:
    """Return ``config`` with the real numbers of these ports."""
    real = [port.number for port in ports]
    return msgspec.structs.replace(config, **dict(zip(ports_of(config), real, strict=False)))
