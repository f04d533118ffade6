"""Publishing of the weights that verl gives: pairs of name and tensor, from an iterator that may be asynchronous or
empty. Imports neither verl nor Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.frameworks.verl_server import CONTROL_S
from fastdeploy.rl.publish import Publication
from fastdeploy.rl.state_transfer import NamedTensors, each_item


async def publish_step(
    client: RolloutClient, weights: NamedTensors, global_steps: int | None, **options: Any
) -> Publication:
    """Publish full tensors as version ``global_steps``; None: as the version that serves now. options: of
    RolloutClient.publish."""
    version: str | int | None = global_steps
    if version is None:
        version = (await client.replicas[0].call("GET", "/v1/weights", CONTROL_S))["version"]
    return await client.publish(weights, version, **options)


async def peek_first(weights: NamedTensors) -> tuple[bool, AsyncIterator[tuple[str, Any]]]:
    """Return whether ``weights`` has a tensor, and an iterator of all tensors."""
    rest = each_item(weights)
    first = await anext(rest, None)

    async def all_pairs() -> AsyncIterator[tuple[str, Any]]:
        if first is not None:
            yield first
            async for pair in rest:
                yield pair

    return first is not None, all_pairs()
