"""Settings of the processes: immutable, without unknown keys. The supervisor passes them to its children as JSON."""

from __future__ import annotations

import ipaddress
import os
import tempfile
from typing import TypeVar

import msgspec

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.files import SHARED_MEMORY
from fastdeploy.core.sampling_params import LOGPROBS_MODES

PAUSE_MODES = ("abort", "wait", "keep")
DTYPES = ("auto", "float32", "bfloat16")
STANDBY_POLICIES = ("auto", "on", "off")
MAX_TTL_S = 31 * 86400.0  # of a hold
MAX_SOCKET_PATH = 107  # bytes that the kernel takes
FLEET_ENDPOINT = f"ipc://PATH of at most {MAX_SOCKET_PATH} bytes, or tcp://HOST:PORT"
UPLOAD_PREFIX = "fastdeploy-upload-"
Config = TypeVar("Config", bound=msgspec.Struct)


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the engine process.

    Model
        served_model_name: the model's name in requests and replies.
        max_model_len: tokens of prompt and output together; None = the checkpoint's own.

    Steps
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: tokens in one step.
        max_step_ms: longest time that a step with prefill should take.
        heartbeat_s: time between two heartbeats to the API servers.
        engines_on_host: engines that share this machine; each takes its part of the memory that is free.

    KV cache
        block_size: tokens of one KV block.
        num_gpu_blocks_override: KV blocks; None = from kv_cache_gb.
        kv_cache_gb: GiB of KV cache; None = from the memory that is free.

    Fleet
        fleet_endpoint: second address that the engine listens on, for the gateway of a fleet: "ipc://path" or
            "tcp://host:port", port 0 = any free one; "" = none. TCP needs FASTDEPLOY_FLEET_KEY in the environment.

    Requests
        max_waiting: choices that may wait; further requests get 429.
        max_retained: requests with retain_s whose results are kept.
        max_retained_mb: MiB that the results of all requests with retain_s may take.

    Weights
        model_roots: folders that weights may be loaded from; ("/",) is any path, () is none.
        upload_dir: see ServeConfig.
        spill_dir: folder for sleeping weights; "" = the temporary folder.
        stage_timeout_s: seconds to read and check new weights, or one part of them, if the call names none.
        standby_weights: keep a second copy of the weights, which makes updates fast: auto = where memory allows.
        lost_commit: an earlier engine of this server had newer weights.

    Restarts
        short_lives: times in a row that the engine of this server has ended, without a minute of service between.

    Adapters
        adapter_memory_mb: MiB of packed adapters in memory; adapters beyond that are read again when they are named.
        adapter_root: folder in which unknown adapter names are looked up; "" = nowhere.
        adapter_store: folder for copies of loaded adapters; "" = the temporary folder.
        max_lora_rank: largest rank of an adapter.

    Trace
        trace: file for a trace of all that happens; "" = none. trace_max_mb: MiB after which the trace ends.
    """

    model: str
    served_model_name: str = "default"
    dtype: str = "auto"
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_gb: float | None = None
    max_waiting: int = 16384
    max_step_ms: float = 250.0
    enable_prefix_caching: bool = True
    heartbeat_s: float = 1.0
    lost_commit: bool = False
    short_lives: int = 0
    model_roots: tuple[str, ...] = ()
    upload_dir: str = ""
    spill_dir: str = ""
    max_retained: int = 4096
    stage_timeout_s: float = 600.0
    standby_weights: str = "auto"
    max_retained_mb: int = 1024
    adapter_memory_mb: int = 1024
    adapter_root: str = ""
    adapter_store: str = ""
    max_lora_rank: int = 64
    trace: str = ""
    trace_max_mb: int = 1024
    engines_on_host: int = 1
    fleet_endpoint: str = ""

    def check(self) -> EngineConfig:
        """Return self, or raise InvalidField naming the first setting that is out of range."""
        _require_writable("spill_dir", self.spill_dir)
        _require_writable("adapter_store", self.adapter_store)
        if self.trace:
            is_file = os.path.isfile(self.trace) or not os.path.exists(self.trace)
            _require("trace", is_file, "a regular file or a new one", self.trace)
            _require_writable("trace", os.path.dirname(os.path.abspath(self.trace)))
        _require("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}", self.dtype)
        policy = self.standby_weights
        _require("standby_weights", policy in STANDBY_POLICIES, f"one of {', '.join(STANDBY_POLICIES)}", policy)
        require_positive_numbers(self, but=("max_retained", "short_lives"))
        _require("fleet_endpoint", _is_fleet_endpoint(self.fleet_endpoint), FLEET_ENDPOINT, self.fleet_endpoint)
        return self


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the API servers. The limits of connections and bodies are per API server process.

    Address
        host, port: address to listen on; port 0 = any free one.
        workers: API server processes.
        control_port: the only port that answers control routes; None = port.

    Life
        keepalive_s: seconds without an event after which an open stream gets an SSE comment.
        http_keepalive_s: seconds after which an idle connection is closed.
        shutdown_s: seconds for an orderly end, after which processes are killed.
        stall_s: seconds without a heartbeat after which the engine is killed as stuck.

    Connections and request bodies
        max_connections: open connections at once (429).
        max_header_kb: KiB of the headers of one request (431).
        header_s: seconds in which the headers of a request must arrive (408).
        max_body_mb: MiB of one request body (413).
        max_bodies_mb: MiB of all request bodies that are being received; others wait up to body_idle_s (429).
        body_idle_s: seconds in which each MiB of a request body must arrive (408).

    Weight uploads
        max_upload_mb: MiB of one weight upload (413).
        max_uploads: weight uploads at once; others wait up to body_idle_s (429).
        upload_dir: folder for uploads; "" = shared memory if it has room, else the temporary folder.

    Weights
        model_roots, stage_timeout_s: as in EngineConfig, for the routes that copy and patch checkpoints.
        pull_root: folder below which those routes may write; "" = nowhere.

    Requests and replies
        served_model_name: the model's name in requests and replies.
        logprobs_mode: mode of a request that names none.
        max_reply_logprobs: log probabilities that one request may ask for.
        vllm_pause_mode, sglang_pause_mode, areal_pause_mode: mode of a pause call of that dialect that names no mode.
        dialect_hold_ttl_s: seconds after which the hold of such a pause ends by itself. These routes have no field for
            it, so nobody would release the hold of a trainer that died.

    Access
        trust_request_chat_template: a chat request may bring its own template, a program that the API server runs.
        insecure_control: control routes need no key, even if other machines can reach them.
        allowed_hosts: names that the Host header may have, besides the names of loopback; "*" = any.
        allowed_origins: origins of web pages that may use this server; "*" = any.

    API keys are not settings, since /server_info shows the settings (see http/guards/keys.py).
    """

    model: str
    served_model_name: str = "default"
    host: str = "127.0.0.1"
    port: int = 8180
    workers: int = 1
    keepalive_s: float = 10.0
    shutdown_s: float = 10.0
    stall_s: float = 10.0
    http_keepalive_s: int = 75
    max_body_mb: int = 32
    max_upload_mb: int = 4096
    max_bodies_mb: int = 512
    max_uploads: int = 4
    max_connections: int = 16384
    max_header_kb: int = 256
    header_s: float = 30.0
    body_idle_s: float = 30.0
    max_reply_logprobs: int = 8 << 20
    upload_dir: str = ""
    logprobs_mode: str = "raw"
    vllm_pause_mode: str = "abort"
    sglang_pause_mode: str = "abort"
    areal_pause_mode: str = "abort"
    dialect_hold_ttl_s: float = 600.0
    trust_request_chat_template: bool = False
    model_roots: tuple[str, ...] = ()
    control_port: int | None = None
    insecure_control: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    pull_root: str = ""
    stage_timeout_s: float = 600.0

    def check(self) -> ServeConfig:
        """Return self, or raise InvalidField naming the first setting that is out of range."""
        for field, port in (("port", self.port), ("control_port", self.control_port or 0)):
            _require(field, 0 <= port < 65536, "a port from 0 to 65535", port)
        if self.control_port:
            _require("control_port", self.control_port != self.port, "another port than --port", self.control_port)
        for origin in self.allowed_origins:
            complete = origin == "*" or ("://" in origin and not origin.endswith("/"))
            _require("allowed_origins", complete, "origins such as http://localhost:3000", origin)
        _require("workers", 1 <= self.workers <= 64, "an integer from 1 to 64", self.workers)
        require_positive_numbers(self, but=("port", "control_port"))
        ttl_s = self.dialect_hold_ttl_s
        _require("dialect_hold_ttl_s", ttl_s <= MAX_TTL_S, "at most 31 days, in seconds", ttl_s)
        _require_writable("upload_dir", self.upload_dir)
        _require_writable("pull_root", self.pull_root)
        _require("logprobs_mode", self.logprobs_mode in LOGPROBS_MODES, ", ".join(LOGPROBS_MODES), self.logprobs_mode)
        for field in ("vllm_pause_mode", "sglang_pause_mode", "areal_pause_mode"):
            _require(field, getattr(self, field) in PAUSE_MODES, ", ".join(PAUSE_MODES), getattr(self, field))
        return self


def upload_folders(upload_dir: str) -> tuple[str, ...]:
    """Return the folders for weight uploads, the preferred one first. The engine reads uploads from no other folder."""
    return (upload_dir,) if upload_dir else (SHARED_MEMORY, tempfile.gettempdir())


def is_loopback(host: str) -> bool:
    """Return whether ``host``, a name or an address, can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_fleet_endpoint(endpoint: str) -> bool:
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme == "tcp":
        return bool(host) and " " not in host and port.isascii() and port.isdigit() and int(port) < 65536
    return not endpoint or (scheme == "ipc" and 0 < len(os.fsencode(address)) <= MAX_SOCKET_PATH)


def to_json(config: msgspec.Struct) -> str:
    """Return ``config`` as JSON."""
    return msgspec.json.encode(config).decode()


def from_json(text: str, kind: type[Config]) -> Config:
    """Inverse of :func:`to_json`. Raises msgspec.ValidationError for unknown keys and wrong types."""
    return msgspec.json.decode(text.encode(), type=kind)


def _require(field: str, ok: bool, expected: str, got: object) -> None:
    if not ok:
        raise InvalidField(field, f"expected {expected}, got {got!r}")


def require_positive_numbers(config: msgspec.Struct, but: tuple[str, ...] = ()) -> None:
    """Raise InvalidField for a number that is not above 0. Fields named in ``but`` are not checked."""
    for field, value in msgspec.structs.asdict(config).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(field, field in but or not is_number or value > 0, "a number above 0", value)


def _require_writable(field: str, folder: str) -> None:
    """Raise InvalidField unless a file can be made in ``folder``. "" stands for the default, which is not checked."""
    if not folder:
        return
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InvalidField(field, f"expected a folder to write to, got {folder!r}: {error.strerror}") from error
