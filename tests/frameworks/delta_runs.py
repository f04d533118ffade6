"""A policy that changes, and a server that is asked what it serves. For the children that run delta trainers in the
environment of the frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

PROMPT = list(range(40, 60))


class Policy:
    """The parameters of a policy, of which each step changes some values."""

    def __init__(self, model: str):
        self.tensors = load_file(f"{model}/model.safetensors")
        self._random = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    def step(self) -> None:
        self.tensors = {name: self._changed(tensor) for name, tensor in self.tensors.items()}

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor:
        where = torch.rand(tensor.shape, generator=self._random) < 0.02
        factor = 1 + torch.randn(tensor.shape, generator=self._random) / 2
        return torch.where(where, tensor * factor.to(tensor.dtype), tensor)


class Engine:
    """The server, as a client of its own sees it."""

    def __init__(self, url: str, model: str):
        self._http = httpx.Client(base_url=url, timeout=60)
        self._config = Path(model, "config.json").read_bytes()

    def state(self) -> list[Any]:
        """Return the greedy answer, the checksum over all weights, and their version."""
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}}
        tokens = self._http.post("/generate", json=body).json()["output_ids"]
        checksum = self._http.post("/weights_checker", json={"action": "checksum"}).json()["per_engine_checksum"]
        return [tokens, checksum, self._http.get("/v1/weights").json()["result"]["version"]]

    def load(self, tensors: dict[str, torch.Tensor], folder: Path, version: int) -> list[Any]:
        """Load the whole weights from the new ``folder``, and return the state."""
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_bytes(self._config)
        body = {"model_path": str(folder), "weight_version": str(version)}
        reply = self._http.post("/update_weights_from_disk", json=body)
        assert reply.status_code == 200, reply.text
        return self.state()


def spoil(folder: Path) -> None:
    """Change one byte of the payloads of a published version."""
    path = sorted(folder.glob("*.safetensors"))[0]
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 0xFF
    path.write_bytes(raw)
