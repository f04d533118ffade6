"""Access to routes: which key opens which route, and on which port.

A route declares its class where it is added: ``@RouteAccess.DATA`` above its function. A route without a class is
CONTROL, and so is any path without a route. The rules, in this order:

1. OPEN routes answer every client.
2. With --control-port, CONTROL routes are answered on that port only. That port answers all other routes too.
3. A server that other machines can reach and that has no control key refuses CONTROL routes. With --insecure-control it
   answers them, but refuses uploads of weights: it takes new weights from folders under --model-root only.
4. DATA routes need an API key or a control key, if the server has API keys. WATCH routes need one of them if the
   server has keys of either kind.
5. CONTROL routes need a control key, or an API key if the server has API keys only.

With --metrics-port, METRICS routes are answered on that port only, as FastDeploy has it, and that port answers nothing
else but HEALTH routes. So a firewall can open it to the machine that scrapes.

Without --faults, a request that asks for a fault is refused, since a test that gets no fault would prove nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import hmac
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import Scope

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import FastDeployError, Forbidden, InvalidField, InvalidKey, RouteNotFound
from fastdeploy.http.guards.body_limit import JSON_UPLOAD_PATHS
from fastdeploy.http.guards.keys import CONTROL_KEY, Keys, is_exposed

METRICS = frozenset({"/metrics", "/config-info"})
HEALTH = frozenset({"/health", "/liveness", "/ready", "/version"})
KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class RouteAccess(enum.Enum):
    """The classes of routes. OPEN: needs no guard. DATA: generates, tokenizes, or reads the state. WATCH: shows the
    requests of other clients. CONTROL: affects other clients, reads or writes files, or computes over all weights."""

    OPEN = enum.auto()
    DATA = enum.auto()
    WATCH = enum.auto()
    CONTROL = enum.auto()

    def __call__(self, endpoint: Endpoint) -> Endpoint:
        """Declare this class for the route of ``endpoint``, as a decorator."""
        endpoint.__dict__["access"] = self
        return endpoint


class RouteTable:
    """The class of each path. Built once, when all routes are known."""

    def __init__(self, routes: Iterable[BaseRoute]):
        self.classes: dict[str, RouteAccess] = {}
        for route in routes:
            assert isinstance(route, APIRoute)
            access = getattr(route.endpoint, "access", RouteAccess.CONTROL)
            assert self.classes.setdefault(route.path, access) is access, f"{route.path} has two classes"
        # Routes with a parameter: the part of the path before it, and the class.
        self._below = [(path.partition("{")[0], access) for path, access in self.classes.items() if "{" in path]

    def access_of(self, path: str) -> RouteAccess | None:
        """Return the class of the route that answers ``path``, or None if there is no such route."""
        return self.classes.get(path) or next((a for start, a in self._below if path.startswith(start)), None)


@dataclasses.dataclass(frozen=True)
class AccessPolicy:
    """The settings that decide about access. exposed: see keys.is_exposed."""

    routes: RouteTable
    keys: Keys
    exposed: bool
    insecure_control: bool
    control_port: int | None
    metrics_port: int | None = None
    has_faults: bool = False

    @classmethod
    def of(cls, config: ServeConfig, keys: Keys, routes: RouteTable) -> AccessPolicy:
        """Return the policy of a server with these settings. The ports of ``config`` must be the real ones, not 0."""
        metrics_port = None if config.metrics_port == config.port else config.metrics_port
        return cls(
            routes,
            keys,
            is_exposed(config, keys),
            config.insecure_control,
            config.control_port,
            metrics_port,
            bool(config.faults),
        )

    def check(self, scope: Scope) -> FastDeployError | None:
        """Return the error for the request of ``scope``, or None: its :meth:`refusal`, or that it asks for a fault."""
        path, headers = scope["path"], scope["headers"]
        _, port = scope.get("server") or (None, None)
        error = self.refusal(path, port, bearer_key(headers), is_upload(path, headers))
        return error if error or self.has_faults else _fault_refusal(path, headers)

    def check_control(self, scope: Scope) -> FastDeployError | None:
        """Return the error for a request that may not use control routes, whatever its port and its path are."""
        return self._control_refusal(self.control_port, is_upload=False) or _key_refusal(
            bearer_key(scope["headers"]), RouteAccess.CONTROL, self.keys
        )

    def refusal(self, path: str, port: int | None, key: bytes | None, is_upload: bool) -> FastDeployError | None:
        """Return the error for a request that breaks a rule of this module, or None. port: local port of the
        connection. key: the key in the Authorization header."""
        if not self._is_on_its_port(path, port):
            return RouteNotFound("there is no such route on this port: see --metrics-port")
        known = self.routes.access_of(path)
        access = known or RouteAccess.CONTROL
        if access is RouteAccess.OPEN:
            return None
        forbidden = self._control_refusal(port, is_upload) if access is RouteAccess.CONTROL else None
        error = forbidden or _key_refusal(key, access, self.keys)
        if isinstance(error, Forbidden) and known is None:
            return RouteNotFound("there is no such route")
        return error

    def _is_on_its_port(self, path: str, port: int | None) -> bool:
        if self.metrics_port is None:
            return True
        if port == self.metrics_port:
            return path in METRICS or path in HEALTH
        return path not in METRICS

    def _control_refusal(self, port: int | None, is_upload: bool) -> Forbidden | None:
        if self.control_port not in (None, port):
            return Forbidden(f"this route is answered on the control port only ({self.control_port})")
        if self.exposed and not self.insecure_control:
            return Forbidden(
                "control routes are off: other machines can reach this server and it has no control key. Start it with "
                f"--control-key FILE or {CONTROL_KEY}, or on a loopback --host; or allow it with --insecure-control"
            )
        if self.exposed and is_upload:
            flags = f"--control-key FILE or {CONTROL_KEY}"
            return Forbidden(f"uploads of weights need a control key on this server ({flags})")
        return None


def _fault_refusal(path: str, headers: Iterable[tuple[bytes, bytes]]) -> RouteNotFound | InvalidField | None:
    hint = "faults are off: start the server with --faults"
    if path == "/v1/faults":
        return RouteNotFound(hint)
    return InvalidField("X-Fault", hint) if b"x-fault" in dict(headers) else None


def _key_refusal(given: bytes | None, access: RouteAccess, keys: Keys) -> InvalidKey | Forbidden | None:
    wanted = keys.control or keys.data
    if access is RouteAccess.DATA:
        wanted = keys.data and keys.data + keys.control
    if access is RouteAccess.WATCH:
        wanted = keys.data + keys.control
    if not wanted or (given is not None and _is_one_of(given, wanted)):
        return None
    if given is None:
        return InvalidKey("this route needs a key: expected the header 'Authorization: Bearer KEY'")
    if _is_one_of(given, keys.data):
        return Forbidden("this route needs a control key; the key given is an API key, which opens data routes only")
    return InvalidKey("the key given is not valid here")


def _is_one_of(given: bytes, keys: Sequence[bytes]) -> bool:
    """Compare ``given`` with every key, so that the time of the comparison does not tell how similar a key is."""
    return sum(hmac.compare_digest(given, key) for key in keys) > 0


def bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key of ``Authorization: Bearer KEY``, or of ``X-Api-Key``, which Anthropic's clients send. None unless
    there is exactly one of these headers."""
    values = [(name, value) for name, value in headers if name in KEY_HEADERS]
    if len(values) != 1:
        return None
    name, value = values[0]
    if name == b"x-api-key":
        return value.strip()
    scheme, _, key = value.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def is_upload(path: str, headers: Collection[tuple[bytes, bytes]]) -> bool:
    """Return whether the body may be tensors. An empty body is not: aiohttp gives it the content type of octets."""
    octets = any(name == b"content-type" and b"octet-stream" in value.lower() for name, value in headers)
    return path in JSON_UPLOAD_PATHS or (octets and (b"content-length", b"0") not in headers)
