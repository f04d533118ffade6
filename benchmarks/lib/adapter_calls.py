"""Control calls for adapters: loads in vLLM's form, which both servers have, and pauses of one adapter in ours."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lib.client import Client
from benchmarks.lib.dialect import ServerError

TIMEOUT_S = 600.0


async def load_adapter(client: Client, lora_name: str, folder: Path, in_place: bool = False) -> None:
    """Load a PEFT folder, or replace the adapter of this name. Raises ServerError."""
    body = {"lora_name": lora_name, "lora_path": str(folder), "load_inplace": in_place}
    await _post(client, "/v1/load_lora_adapter", body)


async def pause_adapter(client: Client, lora_name: str) -> None:
    """Freeze the requests of one adapter (mode keep); return when they are frozen. Raises ServerError."""
    await _post(client, "/v1/pause", {"lora_name": lora_name, "mode": "keep"})


async def resume_adapter(client: Client, lora_name: str) -> None:
    await _post(client, "/v1/resume", {"lora_name": lora_name})


async def _post(client: Client, path: str, body: dict[str, object]) -> None:
    reply = await client.call("POST", path, body, TIMEOUT_S)
    if reply.status != 200:
        raise ServerError(f"{path} {body}: HTTP {reply.status}: {str(reply.body)[:300]}")
