"""Settings of the processes: immutable, without unknown keys. The supervisor passes them to its children as JSON.

A setting with a Flag is a flag of the command line, whose type, default and text come from here.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
from functools import partial
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.files import SHARED_MEMORY
from fastdeploy.core.sampling_params import LOGPROBS_MODES

PAUSE_MODES = ("abort", "wait", "keep")
DTYPES = ("auto", "float32", "bfloat16")
QUANTIZATIONS = ("int8",)
STANDBY_POLICIES = ("auto", "on", "off")
AUTO, NO_PARSER = "auto", "none"
TOOL_CALL_PARSERS = (
    AUTO, NO_PARSER, "deepseek_v3", "deepseek_v31", "ernie45", "glm45", "hermes", "llama3_json", "qwen3_coder",
)  # fmt: skip
REASONING_PARSERS = (AUTO, NO_PARSER, "deepseek_r1", "ernie45", "glm45", "qwen3")
ROUTED_EXPERTS_FORMATS = ("vllm", "prime-rl", "nemo-rl", "none")
MAX_TTL_S = 31 * 86400.0  # of a hold
MAX_SOCKET_PATH = 107  # bytes that the kernel takes
STANDBY = """keep a second copy of the weights in memory, which makes updates fast. auto: made if the bytes of weights
and KV cache and 1 GiB are free, kept while 1 GiB is free"""
MAX_STEP = "one limit for all steps with prompts (1.5 steps of the requests that ran before; without any, 250)"
QUANTIZATION = "multiply with 8-bit values, which each load and each update makes of the bfloat16 weights (none)"
MEMORY_SHARE = "share of the machine's memory that weights and KV cache may have (a KV cache of at most 2 GiB)"
ROUTED_FORMAT = "form of the routed experts that replies have unasked, with --enable-return-routed-experts"
FLEET_ENDPOINT = f"ipc://PATH of at most {MAX_SOCKET_PATH} bytes, or tcp://HOST:PORT"
ROUTED_EXPERTS = "keep which experts computed each token, for requests that ask (routed_experts)"
UPLOAD_PREFIX = "fastdeploy-upload-"
Config = TypeVar("Config", bound=msgspec.Struct)


class Flag(NamedTuple):
    """The flag of a setting: the heading in ``--help`` that it is under, its text with what holds without it, and the
    values that it may have (none = any of its type)."""

    heading: str
    text: str
    choices: tuple[str, ...] = ()


_http, _request, _access = partial(Flag, "HTTP"), partial(Flag, "requests"), partial(Flag, "access")
_limit = partial(Flag, "connections, request bodies and uploads")
_engine, _weight, _adapter = partial(Flag, "engine"), partial(Flag, "weights"), partial(Flag, "adapters")
_fleet, _session = partial(Flag, "fleet"), partial(Flag, "sessions of agents")


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the engine process. model_roots: folders that weights may be loaded from; ("/",) is any path, () is
    none. fleet_endpoint: port 0 = any free one.

    Not flags: heartbeat_s, seconds between two heartbeats to the API servers. lost_commit: an earlier engine of this
    server had other weights. short_lives: times in a row that the engine of this server has ended, without a minute of
    service between. engines_on_host: engines that share this machine; each takes its part of the memory that is free.
    faults_dir: as in ServeConfig.
    """

    model: str
    served_model_name: str = "default"
    model_roots: tuple[str, ...] = ()
    heartbeat_s: float = 1.0
    lost_commit: bool = False
    short_lives: int = 0
    engines_on_host: int = 1
    faults_dir: str = ""

    dtype: Annotated[str, _engine("of weights and KV cache; auto: the checkpoint's", DTYPES)] = "auto"
    quantization: Annotated[str | None, _engine(QUANTIZATION, QUANTIZATIONS)] = None
    max_model_len: Annotated[int | None, _engine("tokens of prompt and output together (the checkpoint's)")] = None
    max_num_seqs: Annotated[int, _engine("sequences per step")] = 32
    max_num_batched_tokens: Annotated[int, _engine("tokens per step")] = 2048
    max_step_ms: Annotated[float | None, _engine(MAX_STEP)] = None
    max_waiting: Annotated[int, _engine("choices that may wait, then 429")] = 16384
    block_size: Annotated[int, _engine("tokens per KV block")] = 16
    num_gpu_blocks_override: Annotated[int | None, _engine("KV blocks (from --kv-cache-gb, or the free memory)")] = None
    kv_cache_gb: Annotated[float | None, _engine("memory for the KV cache in GiB")] = None
    gpu_memory_utilization: Annotated[float | None, _engine(MEMORY_SHARE)] = None
    enable_prefix_caching: Annotated[bool, _engine("reuse the KV of equal prompt beginnings")] = True
    enable_speculative_decoding: Annotated[bool, _engine("verify tokens that recent text predicts")] = True
    enable_return_routed_experts: Annotated[bool, _engine(ROUTED_EXPERTS)] = False
    max_retained: Annotated[int, _engine("results kept for retain_s")] = 4096
    max_retained_mb: Annotated[int, _engine("MiB of such results, those of running requests included")] = 1024
    trace: Annotated[str, _engine("file for a trace; one that exists is kept, and NAME.2.json is written")] = ""
    trace_max_mb: Annotated[int, _engine("MiB after which a trace ends")] = 1024

    upload_dir: Annotated[str, _weight("where uploads are spooled (shared memory if it has room, or TMPDIR)")] = ""
    stage_timeout_s: Annotated[float, _weight("seconds in which new weights, or a part, must be read")] = 600.0
    spill_dir: Annotated[str, _weight("where sleeping weights are written (TMPDIR)")] = ""
    standby_weights: Annotated[str, _weight(STANDBY, STANDBY_POLICIES)] = "auto"

    adapter_memory_mb: Annotated[int, _adapter("MiB of packed adapters; those used least recently leave")] = 1024
    adapter_root: Annotated[str, _adapter("folder in which unknown adapter names are looked up (nowhere)")] = ""
    adapter_store: Annotated[str, _adapter("where the server keeps copies of loaded adapters (TMPDIR)")] = ""
    max_lora_rank: Annotated[int, _adapter("largest rank of an adapter")] = 64

    fleet_endpoint: Annotated[str, _fleet(f"second address of the engine, for a fleet: {FLEET_ENDPOINT} (none)")] = ""

    def check(self) -> EngineConfig:
        """Return self, or raise InvalidField naming the first setting that is out of range."""
        _require_writable("spill_dir", self.spill_dir)
        _require_writable("adapter_store", self.adapter_store)
        if self.trace:
            is_file = os.path.isfile(self.trace) or not os.path.exists(self.trace)
            _require("trace", is_file, "a regular file or a new one", self.trace)
            _require_writable("trace", os.path.dirname(os.path.abspath(self.trace)))
        _require_choices(self)
        require_positive_numbers(self, but=("max_retained", "short_lives"))
        share = self.gpu_memory_utilization
        _require("gpu_memory_utilization", share is None or share <= 1, "a share from 0 to 1", share)
        _require("fleet_endpoint", _is_fleet_endpoint(self.fleet_endpoint), FLEET_ENDPOINT, self.fleet_endpoint)
        return self


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the API servers. The limits of connections and bodies are per API server process. model_roots,
    stage_timeout_s, upload_dir: as in EngineConfig. trust_request_chat_template: a template is a program, which the API
    server runs. dialect_hold_ttl_s: the pause routes of frameworks have no field for it, so nobody would release the
    hold of a trainer that died.

    faults: "" = off, "on", or the path of a schedule file. See fastdeploy/faults.

    Not flags: http_keepalive_s, seconds after which an idle connection is closed. max_header_kb, header_s: KiB of the
    headers of a request (431), and seconds in which they must arrive (408). faults_dir: folder in which the processes
    of a server with faults keep what is armed.

    API keys are not settings, since /server_info shows the settings (see http/guards/keys.py).
    """

    model: str
    served_model_name: str = "default"
    model_roots: tuple[str, ...] = ()
    stage_timeout_s: float = 600.0
    upload_dir: str = ""
    http_keepalive_s: int = 75
    max_header_kb: int = 256
    header_s: float = 30.0
    faults: str = ""
    faults_dir: str = ""

    host: Annotated[str, _http("address to listen on")] = "127.0.0.1"
    port: Annotated[int, _http("port to listen on, 0 = any free one")] = 8180
    metrics_port: Annotated[int | None, _http("the only one for /metrics, 0 = any free one (--port)")] = None
    workers: Annotated[int, _http("API server processes")] = 1
    keepalive_s: Annotated[float, _http("a stream that is silent for so many seconds gets a comment")] = 10.0
    shutdown_s: Annotated[float, _http("seconds that a shutdown may take; then processes are killed")] = 10.0
    stall_s: Annotated[float, _http("an engine that is silent for so many seconds is killed")] = 10.0

    max_connections: Annotated[int, _limit("open connections (429)")] = 16384
    max_body_mb: Annotated[int, _limit("MiB a request body may have (413)")] = 32
    max_bodies_mb: Annotated[int, _limit("MiB of bodies being received; others wait for body_idle_s, then 429")] = 512
    body_idle_s: Annotated[float, _limit("seconds in which each MiB of a body must arrive (408)")] = 30.0
    max_upload_mb: Annotated[int, _limit("MiB a weight upload may have (413)")] = 4096
    max_uploads: Annotated[int, _limit("weight uploads at once; others wait for body_idle_s, then 429")] = 4

    session_dir: Annotated[str, _session("folder of the turns of sessions (one that ends with the server)")] = ""
    max_sessions_mb: Annotated[int, _session("MiB of sessions; those used least recently are forgotten")] = 1024
    session_ttl_s: Annotated[float, _session("seconds after its last turn for which a session is kept")] = 21600.0

    max_reply_logprobs: Annotated[int, _request("of one request: choices x max_tokens x (1 + top)")] = 8 << 20
    logprobs_mode: Annotated[str, _request("of requests that name none; SGLang: temperature", LOGPROBS_MODES)] = "raw"
    return_sampling_mask: Annotated[bool, _request("vllm's route tells the ids that each token was drawn from")] = False
    return_sampling_mask_logprobs: Annotated[bool, _request("and their log probabilities")] = False
    routed_experts_format: Annotated[str, _request(ROUTED_FORMAT, ROUTED_EXPERTS_FORMATS)] = "vllm"
    fastdeploy_form: Annotated[bool, _request("the routes of chats, completions and sleep are FastDeploy's")] = False
    chat_template: Annotated[str, _request("Jinja, or a file of it, in place of the model's own template")] = ""
    trust_request_chat_template: Annotated[bool, _request("run the chat_template that a request brings")] = False
    tool_call_parser: Annotated[str, _request("format of tool calls; auto: the template's", TOOL_CALL_PARSERS)] = AUTO
    reasoning_parser: Annotated[str, _request("format of reasoning; auto: the template's", REASONING_PARSERS)] = AUTO
    vllm_pause_mode: Annotated[str, _request("of a pause by a vllm route that names no mode", PAUSE_MODES)] = "abort"
    sglang_pause_mode: Annotated[str, _request("the same for routes of sglang", PAUSE_MODES)] = "abort"
    areal_pause_mode: Annotated[str, _request("the same for routes of areal", PAUSE_MODES)] = "abort"
    dialect_hold_ttl_s: Annotated[float, _request("seconds after which the hold of such a pause ends")] = 600.0

    control_port: Annotated[int | None, _access("the only one for control routes, 0 = any free one (--port)")] = None
    insecure_control: Annotated[bool, _access("other machines need no key for control routes")] = False
    allowed_hosts: Annotated[tuple[str, ...], _access("names of this host: A,B; * = any (on loopback its own)")] = ()
    allowed_origins: Annotated[tuple[str, ...], _access("origins of web pages: A,B; * = any (its own)")] = ()

    pull_root: Annotated[str, _weight("folder below which pulls write; weights may be loaded from it (nowhere)")] = ""

    def check(self) -> ServeConfig:
        """Return self, or raise InvalidField naming the first setting that is out of range."""
        for field in ("port", "control_port", "metrics_port"):
            port = getattr(self, field) or 0
            _require(field, 0 <= port < 65536, "a port from 0 to 65535", port)
        if self.control_port:
            _require("control_port", self.control_port != self.port, "another port than --port", self.control_port)
            other = self.metrics_port != self.control_port
            _require("metrics_port", other, "another port than --control-port", self.metrics_port)
        for origin in self.allowed_origins:
            complete = origin == "*" or ("://" in origin and not origin.endswith("/"))
            _require("allowed_origins", complete, "origins such as http://localhost:3000", origin)
        _require("workers", 1 <= self.workers <= 64, "an integer from 1 to 64", self.workers)
        _require("workers", not self.faults or self.workers == 1, "1 with --faults: one process counts", self.workers)
        require_positive_numbers(self, but=("port", "control_port", "metrics_port"))
        ttl_s = self.dialect_hold_ttl_s
        _require("dialect_hold_ttl_s", ttl_s <= MAX_TTL_S, "at most 31 days, in seconds", ttl_s)
        masked = self.return_sampling_mask or not self.return_sampling_mask_logprobs
        field = "return_sampling_mask_logprobs"
        _require(field, masked, "--return-sampling-mask with it", self.return_sampling_mask_logprobs)
        _require_writable("upload_dir", self.upload_dir)
        _require_writable("pull_root", self.pull_root)
        _require_writable("session_dir", self.session_dir)
        _require_choices(self)
        return self


def flags_of(kind: type[msgspec.Struct]) -> list[tuple[msgspec.structs.FieldInfo, Flag]]:
    """Return the settings of a config that have a flag, in order. The type of each is Annotated."""
    marked = [(field, getattr(field.type, "__metadata__", ())) for field in msgspec.structs.fields(kind)]
    return [(field, mark) for field, marks in marked for mark in marks if isinstance(mark, Flag)]


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


def _require_choices(config: msgspec.Struct) -> None:
    for field, flag in flags_of(type(config)):
        value = getattr(config, field.name)
        allowed = not flag.choices or value in (*flag.choices, field.default)
        _require(field.name, allowed, f"one of {', '.join(flag.choices)}", value)


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
