"""The shared secret of a fleet, which guards engines that listen on the network.

Both ends of a TCP connection make their CURVE key pairs of the secret. A client cannot begin the handshake without the
engine's public key. That key is as secret as the secret itself: it is made of it, and never leaves a process except
inside encrypted boxes. So only a holder of the secret can connect, and no list of client keys (ZAP) is needed. The
client in turn knows that it speaks to a holder of the secret.

The secret comes from the environment alone. It is never in a config or on a command line, and no error repeats it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, MutableMapping
from functools import cache
from typing import Any, NamedTuple

from fastdeploy.core.errors import InvalidField

FLEET_KEY = "FASTDEPLOY_FLEET_KEY"
MIN_CHARS, MAX_CHARS = 32, 1024
# scrypt makes each guess slow, in case the secret was thought up by a person.
SALT, COST, BLOCK = b"fastdeploy fleet 1", 1 << 14, 8


class KeyPairs(NamedTuple):
    """CURVE key pairs in Z85: of all engines of a fleet, and of all clients."""

    engine_public: bytes
    engine_secret: bytes
    client_public: bytes
    client_secret: bytes


def check_fleet_key(secret: str) -> str:
    """Return ``secret``. Raises InvalidField, whose field is FASTDEPLOY_FLEET_KEY, if it can be no fleet key."""
    fits = MIN_CHARS <= len(secret) <= MAX_CHARS and all("!" <= character <= "~" for character in secret)
    if not fits:
        expected = f"expected {MIN_CHARS} to {MAX_CHARS} printable ASCII characters without spaces"
        raise InvalidField(FLEET_KEY, f"{expected}, such as those of 'openssl rand -hex 32'; got {len(secret)}")
    return secret


def read_fleet_key(environment: Mapping[str, str]) -> str | None:
    """Return the fleet key in ``environment``, or None if there is none. Raises InvalidField as check_fleet_key."""
    return check_fleet_key(environment[FLEET_KEY]) if environment.get(FLEET_KEY) else None


def pop_fleet_key(environment: MutableMapping[str, str]) -> str | None:
    """Move the fleet key out of ``environment``, so that no child process inherits it. Raises as read_fleet_key."""
    try:
        return read_fleet_key(environment)
    finally:
        environment.pop(FLEET_KEY, None)


def require_fleet_key(endpoint: str, secret: str | None) -> None:
    """Raise InvalidField if ``endpoint`` can be reached over the network and there is no secret."""
    if endpoint.startswith("tcp://") and secret is None:
        raise InvalidField(FLEET_KEY, f"expected a fleet key in the environment, since {endpoint} is on the network")


def with_fleet_key(environment: Mapping[str, str], secret: str | None) -> dict[str, str]:
    """Return a copy of ``environment`` with ``secret`` in place of its own fleet key; None: without a fleet key."""
    rest = {name: value for name, value in environment.items() if name != FLEET_KEY}
    return rest if secret is None else rest | {FLEET_KEY: secret}


@cache
def key_pairs(secret: str) -> KeyPairs:
    """Make the key pairs of ``secret``. The first call for a secret takes about 50 ms."""
    import zmq  # not in every process that reads a key
    from zmq.utils import z85

    root = hashlib.scrypt(check_fleet_key(secret).encode(), salt=SALT, n=COST, r=BLOCK, p=1)

    def pair(role: bytes) -> tuple[bytes, bytes]:
        private: bytes = z85.encode(hmac.digest(root, role, hashlib.sha256))
        return zmq.curve_public(private), private

    return KeyPairs(*pair(b"engine"), *pair(b"client"))


def guard_engine(socket: Any, secret: str) -> None:
    """Let only holders of ``secret`` in at all later ``bind`` calls of ``socket``."""
    keys = key_pairs(secret)
    socket.curve_secretkey, socket.curve_publickey, socket.curve_server = keys.engine_secret, keys.engine_public, True


def guard_client(socket: Any, secret: str) -> None:
    """Show ``secret`` to the engine at the later ``connect`` of ``socket``."""
    keys = key_pairs(secret)
    socket.curve_secretkey, socket.curve_publickey = keys.client_secret, keys.client_public
    socket.curve_serverkey = keys.engine_public
