"""The weights of the embedded model as a trainer has them, and as a server reports them."""

from __future__ import annotations

import numpy as np

from e2e.server import Server
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing.tensors import float32_tensors


def embedded_weights() -> dict[str, np.ndarray]:
    """Return the tensors of the embedded model in float32, sorted by name."""
    return float32_tensors(MODEL_DIR)


def scaled_weights(scale: float) -> list[tuple[str, np.ndarray]]:
    return [(name, tensor * np.float32(scale)) for name, tensor in embedded_weights().items()]


def served_state(server: Server) -> tuple[bool, str, str]:
    """Return whether the server is paused, the version that serves, and the checksum of the weights."""
    info = server.get("/v1/weights?checksums=true").result
    return server.get("/v1/is_paused").result["is_paused"], info["version"], info["checksum"]
