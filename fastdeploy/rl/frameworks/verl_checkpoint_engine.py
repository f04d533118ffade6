"""verl 0.9 integration: a checkpoint engine called "fastdeploy". The trainer's rank 0 publishes to each address.
Importing this module registers the checkpoint engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.frameworks.verl import NAME, actor_name
from fastdeploy.rl.frameworks.verl_server import CONTROL_S, publish_step


@CheckpointEngineRegistry.register(NAME)
class FastDeployCheckpointEngine(CheckpointEngine):
    """Sends weights over HTTP. bucket_size: bytes per part. urls, control_urls: addresses of the servers; without them,
    those of all replicas of this Ray job, with their keys. options: of RolloutClient.publish."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        urls: Sequence[str] = (),
        control_urls: Sequence[str] | None = None,
        **options: Any,
    ):
        self._chunk_mb = max(bucket_size >> 20, 1)
        self._is_master = is_master
        pairs = zip(urls, control_urls or urls, strict=True)
        self._access: list[dict[str, Any]] = [{"url": url, "control_url": control_url} for url, control_url in pairs]
        self._options = options

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return no topology, since no process group is used."""
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        return None

    def finalize(self) -> None:
        return None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Publish as version ``global_steps`` (None keeps the version). Return the time of each phase, as metrics.
        Every rank iterates ``weights``, since each item may be a collective. Raises the error of an address that does
        not commit."""
        if not self._is_master:
            for _pair in weights:
                pass
            return {}
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(RolloutClient(control_s=CONTROL_S, **access))
                for access in self._access or await _access()
            ]
            done = await publish_step(clients, weights, global_steps, chunk_mb=self._chunk_mb, **self._options)
        timings = [publication.report.get("timings_ms", {}) for publication in done]
        phases = sorted({name for timing in timings for name in timing})
        longest = {f"weights/{name}_ms": max(timing.get(name, 0.0) for timing in timings) for name in phases}
        return longest | {"weights/sent_bytes": max(publication.nbytes for publication in done)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Yield nothing: the trainer has sent the weights to the servers."""
        return
        yield


async def _access() -> list[dict[str, Any]]:
    """Return the arguments of a RolloutClient for each address of the replicas whose actors this Ray job can look up by
    name."""
    prefix = actor_name(0).removesuffix("0_0")
    names = sorted(name for name in ray.util.list_named_actors() if name.startswith(prefix))
    if not names:
        raise RuntimeError(f"no actor {prefix}* in this Ray job: set engine_kwargs.{NAME}.urls")
    each = [await ray.get_actor(name).get_access.remote() for name in names]
    return list({access["url"]: access for access in each}.values())
