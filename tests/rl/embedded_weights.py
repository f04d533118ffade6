"""The weights of the embedded model as a trainer has them, and as a server reports them."""

from __future__ import annotations

import json

import numpy as np

from e2e.server import Server
from fastdeploy.embedded import MODEL_DIR


def embedded_weights() -> dict[str, np.ndarray]:
    """Return the tensors of the embedded model in float32, sorted by name."""
    raw = (MODEL_DIR / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    del header["__metadata__"]
    tensors = {}
    for name, entry in sorted(header.items()):
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        bits = np.frombuffer(raw[start:end], "<u2").astype(np.uint32) << 16
        tensors[name] = bits.view(np.float32).reshape(entry["shape"])
    return tensors


def scaled_weights(scale: float) -> list[tuple[str, np.ndarray]]:
    return [(name, tensor * np.float32(scale)) for name, tensor in embedded_weights().items()]


def served_state(server: Server) -> tuple[bool, str, str]:
    """Return whether the server is paused, the version that serves, and the checksum of the weights."""
    info = server.get("/v1/weights?checksums=true").result
    return server.get("/v1/is_paused").result["is_paused"], info["version"], info["checksum"]
