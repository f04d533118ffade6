"""Frozen settings, checked once, unknown keys refused. They travel from the supervisor to its children as JSON."""

from __future__ import annotations

import os
import tempfile
from typing import TypeVar

import msgspec

from fastdeploy.engine.sampling_params import LOGPROBS_MODES
from fastdeploy.errors import InvalidField

PAUSE_MODES = ("abort", "wait", "keep")
DTYPES = ("auto", "float32", "bfloat16")
UPLOAD_PREFIX = "fastdeploy-upload-"
SHARED_MEMORY = "/dev/shm"
Config = TypeVar("Config", bound=msgspec.Struct)


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the one engine process.

    max_model_len None = the checkpoint's own. num_gpu_blocks_override: KV blocks of ``block_size`` tokens; None = from
    ``kv_cache_gb`` (GiB), and if that is None too, from the memory that is free. max_waiting: requests that may wait
    (429 beyond). max_step_ms: a step with prefill in it should not take longer. model_roots: folders that weights may
    be loaded from; ("/",) is any path, () is none. upload_dir: see ServeConfig. spill_dir: where sleeping weights are
    written ("" = the temporary folder). max_retained: requests with retain_s whose results are kept. lost_commit: an
    earlier engine of this server had newer weights.
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
    model_roots: tuple[str, ...] = ()
    upload_dir: str = ""
    spill_dir: str = ""
    max_retained: int = 4096

    def check(self) -> EngineConfig:
        """Return self, or raise InvalidField naming the first setting that is out of range."""
        _require("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}", self.dtype)
        for field in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_waiting"):
            _require(field, getattr(self, field) >= 1, "an integer >= 1", getattr(self, field))
        for field in ("max_model_len", "num_gpu_blocks_override", "kv_cache_gb"):
            value = getattr(self, field)
            _require(field, value is None or value > 0, "a number above 0", value)
        for field in ("max_step_ms", "heartbeat_s"):
            _require(field, getattr(self, field) > 0, "a number above 0", getattr(self, field))
        return self


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the HTTP side.

    port 0 = any free one. keepalive_s: an open stream that sent nothing for so long gets an SSE comment.
    shutdown_s: everything has ended by then, or is killed. stall_s: silence of the engine after which an overdue
    control call counts it as stuck. update_s: time in which a weight update is not looked at for that. max_body_mb: a
    request body of more MiB is refused (413); max_upload_mb: the same of a weight upload. upload_dir: where uploads
    are spooled ("" = shared memory if it has room, else the temporary folder). logprobs_mode: where a request
    names none.
    max_bodies_mb: memory for request bodies that are being received, all together; further ones wait for up to
    body_idle_s (429). max_uploads: weight uploads at once; further ones wait likewise. max_connections: open at once
    (429). max_header_kb: KiB of one request's headers (431). header_s: a request's headers must be there by then (408).
    body_idle_s: in each period of so long a request body must bring 1 MiB, or its end (408). The five are per API
    server. max_reply_logprobs: log probabilities that one request may ask for.
    vllm_pause_mode, sglang_pause_mode, areal_pause_mode: of a pause by a route of that dialect that names no mode.
    model_roots: as of EngineConfig, for routes that copy checkpoints.
    """

    model: str
    served_model_name: str = "default"
    host: str = "127.0.0.1"
    port: int = 8180
    workers: int = 1
    keepalive_s: float = 10.0
    shutdown_s: float = 10.0
    stall_s: float = 10.0
    update_s: float = 300.0
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
    model_roots: tuple[str, ...] = ()

    def check(self) -> ServeConfig:
        """Return self, or raise InvalidField naming the first setting that is out of range."""
        _require("port", 0 <= self.port < 65536, "a port from 0 to 65535", self.port)
        _require("workers", 1 <= self.workers <= 64, "an integer from 1 to 64", self.workers)
        for field in (
            "keepalive_s",
            "shutdown_s",
            "stall_s",
            "update_s",
            "http_keepalive_s",
            "max_body_mb",
            "max_upload_mb",
            "max_bodies_mb",
            "max_uploads",
            "max_connections",
            "max_header_kb",
            "header_s",
            "body_idle_s",
            "max_reply_logprobs",
        ):
            _require(field, getattr(self, field) > 0, "a number above 0", getattr(self, field))
        folder = self.upload_dir
        _require("upload_dir", not folder or os.path.isdir(folder), "an existing folder", folder)
        _require("logprobs_mode", self.logprobs_mode in LOGPROBS_MODES, ", ".join(LOGPROBS_MODES), self.logprobs_mode)
        for field in ("vllm_pause_mode", "sglang_pause_mode", "areal_pause_mode"):
            _require(field, getattr(self, field) in PAUSE_MODES, ", ".join(PAUSE_MODES), getattr(self, field))
        return self


def upload_folders(upload_dir: str) -> tuple[str, ...]:
    """Where an API server may spool a weight upload, first choice first; the engine reads uploads from nowhere else."""
    return (upload_dir,) if upload_dir else (SHARED_MEMORY, tempfile.gettempdir())


def to_json(config: msgspec.Struct) -> str:
    return msgspec.json.encode(config).decode()


def from_json(text: str, kind: type[Config]) -> Config:
    """Inverse of :func:`to_json`; raises msgspec.ValidationError for unknown keys and wrong types."""
    return msgspec.json.decode(text.encode(), type=kind)


def _require(field: str, ok: bool, expected: str, got: object) -> None:
    if not ok:
        raise InvalidField(field, f"expected {expected}, got {got!r}")
