"""Access to routes: which key opens which route, and on which port.

Every route has a class in ROUTES. Any other path counts as CONTROL. The rules, in this order:

1. OPEN routes answer every client.
2. With --control-port, CONTROL routes are answered on that port only. That port answers all other routes too.
3. A server that other machines can reach and that has no control key refuses CONTROL routes. With --insecure-control it
   answers them, but refuses uploads of weights: it takes new weights from folders under --model-root only.
4. DATA routes need an API key or a control key, if the server has API keys. WATCH routes need one of them if the
   server has keys of either kind.
5. CONTROL routes need a control key, or an API key if the server has API keys only.
"""

from __future__ import annotations

import dataclasses
import enum
import hmac
from collections.abc import Collection, Iterable, Sequence

from starlette.types import Scope

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import FastDeployError, Forbidden, InvalidKey, RouteNotFound
from fastdeploy.http.guards.body_limit import JSON_UPLOAD_PATHS
from fastdeploy.http.guards.keys import CONTROL_KEY, Keys, is_exposed


class Access(enum.Enum):
    """The classes of routes. OPEN: needs no guard. DATA: generates, tokenizes, or reads the state. WATCH: shows the
    requests of other clients. CONTROL: affects other clients, reads or writes files, or computes over all weights."""

    OPEN = enum.auto()
    DATA = enum.auto()
    WATCH = enum.auto()
    CONTROL = enum.auto()


_OPEN = (
    "/docs", "/health", "/health_generate", "/liveness", "/metrics", "/openapi.json", "/ready", "/ui", "/ui/page.css",
    "/ui/page.js", "/ui/server.js", "/ui/timeline.js", "/version",
)  # fmt: skip
_WATCH = ("/ui/events",)
_DATA = (
    "/detokenize", "/finish_session", "/generate", "/get_load", "/get_model_info", "/get_server_info",
    "/get_weight_version", "/get_world_size", "/inference/v1/generate", "/is_paused", "/is_sleeping",
    "/model_info", "/server_info", "/skyrl/v1/generate", "/tokenize", "/v1/adapters", "/v1/chat/completions",
    "/v1/chat/completions/render", "/v1/chat/completions/tokens", "/v1/completions", "/v1/is_paused", "/v1/loads",
    "/v1/models", "/v1/models/{model_id:text}", "/v1/replicas", "/v1/replicas/targets", "/weight_info",
)  # fmt: skip
_CONTROL = (
    "/abort_request", "/abort_requests", "/areal_continue_generation", "/areal_init_weights_update_group",
    "/areal_pause_generation", "/areal_set_update_weight_meta", "/areal_set_update_weight_meta_lora",
    "/areal_update_weights", "/areal_update_weights_lora", "/areal_update_weights_lora_xccl",
    "/areal_update_weights_xccl", "/begin_weight_update", "/collective_rpc", "/continue_generation",
    "/destroy_weights_update_group", "/end_weight_update", "/fetch_weights", "/finish_weight_update",
    "/flush_cache", "/inference/v1/abort_requests", "/init_weight_transfer_engine",
    "/init_weights_update_group", "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/pause",
    "/pause_generation", "/post_process_weights", "/pull_weights", "/release_memory_occupation",
    "/reset_prefix_cache", "/resume", "/resume_memory_occupation", "/skyrl/v1/abort_lora_requests",
    "/skyrl/v1/load_lora_adapter", "/sleep", "/start_profile", "/start_weight_update", "/stop_profile",
    "/unload_lora_adapter", "/update_weight_version", "/update_weights", "/update_weights_from_disk",
    "/update_weights_from_distributed", "/update_weights_from_ipc", "/update_weights_from_tensor",
    "/v1/abort_requests", "/v1/adapters/export", "/v1/adapters/load", "/v1/adapters/unload",
    "/v1/load_lora_adapter", "/v1/pause", "/v1/renew", "/v1/replicas/add", "/v1/replicas/drain",
    "/v1/replicas/remove", "/v1/replicas/spool", "/v1/replicas/undrain", "/v1/reset", "/v1/resume",
    "/v1/sleep", "/v1/unload_lora_adapter", "/v1/update_weights", "/v1/wakeup", "/v1/weights",
    "/v1/weights/abort", "/v1/weights/begin", "/v1/weights/chunk", "/v1/weights/commit", "/v1/weights/export",
    "/wake_up",
    "/weight_checker", "/weights_checker",
)  # fmt: skip
ROUTES: dict[str, Access] = (
    dict.fromkeys(_OPEN, Access.OPEN)
    | dict.fromkeys(_DATA, Access.DATA)
    | dict.fromkeys(_WATCH, Access.WATCH)
    | dict.fromkeys(_CONTROL, Access.CONTROL)
)

# Routes with a parameter: the part of the path before it, and the class.
BELOW = [(path.partition("{")[0], access) for path, access in ROUTES.items() if "{" in path]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The parts of a request that decide whether it is allowed. port: local port of the connection. key: the key in the
    Authorization header."""

    path: str
    port: int | None
    key: bytes | None
    is_upload: bool


@dataclasses.dataclass(frozen=True)
class AccessPolicy:
    """The settings that decide about access. exposed: see keys.is_exposed."""

    keys: Keys
    exposed: bool
    insecure_control: bool
    control_port: int | None

    @classmethod
    def of(cls, config: ServeConfig, keys: Keys) -> AccessPolicy:
        """Return the policy of a server with these settings. config.control_port must be the real port, not 0."""
        return cls(keys, is_exposed(config, keys), config.insecure_control, config.control_port)

    def check(self, scope: Scope) -> FastDeployError | None:
        """Return the :func:`refusal` of the request of ``scope``."""
        path, headers = scope["path"], scope["headers"]
        _, port = scope.get("server") or (None, None)
        return refusal(Attempt(path, port, bearer_key(headers), is_upload(path, headers)), self)


def refusal(attempt: Attempt, policy: AccessPolicy) -> FastDeployError | None:
    """Return the error for a request that breaks a rule of this module, or None."""
    known = access_of(attempt.path)
    access = known or Access.CONTROL
    if access is Access.OPEN:
        return None
    forbidden = _control_refusal(attempt, policy) if access is Access.CONTROL else None
    error = forbidden or _key_refusal(attempt.key, access, policy.keys)
    if isinstance(error, Forbidden) and known is None:
        return RouteNotFound("there is no such route")
    return error


def access_of(path: str) -> Access | None:
    """Return the class of the route that answers ``path``, or None if there is no such route."""
    return ROUTES.get(path) or next((access for start, access in BELOW if path.startswith(start)), None)


def _control_refusal(attempt: Attempt, policy: AccessPolicy) -> Forbidden | None:
    if policy.control_port not in (None, attempt.port):
        return Forbidden(f"this route is answered on the control port only ({policy.control_port})")
    if policy.exposed and not policy.insecure_control:
        return Forbidden(
            "control routes are off: other machines can reach this server and it has no control key. Start it with "
            f"--control-key FILE or {CONTROL_KEY}, or on a loopback --host; or allow it with --insecure-control"
        )
    if policy.exposed and attempt.is_upload:
        return Forbidden(f"uploads of weights need a control key on this server (--control-key FILE or {CONTROL_KEY})")
    return None


def _key_refusal(given: bytes | None, access: Access, keys: Keys) -> InvalidKey | Forbidden | None:
    wanted = keys.control or keys.data
    if access is Access.DATA:
        wanted = keys.data and keys.data + keys.control
    if access is Access.WATCH:
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
    """Return the key of ``Authorization: Bearer KEY``; None unless there is exactly one Authorization header."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def is_upload(path: str, headers: Collection[tuple[bytes, bytes]]) -> bool:
    """Return whether the body may be tensors. An empty body is not: aiohttp gives it the content type of octets."""
    octets = any(name == b"content-type" and b"octet-stream" in value.lower() for name, value in headers)
    return path in JSON_UPLOAD_PATHS or (octets and (b"content-length", b"0") not in headers)
