"""The replicas of a fleet on Ray, as a launcher of a gateway sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from fastdeploy.core.errors import FastDeployError
from fastdeploy.entrypoints.ray_actors import KILL_S, ActorKind, RayActors, RayConfig, future_of
from fastdeploy.entrypoints.ray_replica import FastDeployReplica, ReplicaSpec
from fastdeploy.fleet.launcher import WithoutRoll

logger = logging.getLogger(__name__)


class RayLauncher(RayActors, WithoutRoll):
    """Implements fleet.launcher.Launcher with Ray actors. secrets, failed: see RayActors."""

    why_no_roll = "Ray starts the replicas of this fleet: a rolling change works on one host, without --ray"

    def __init__(
        self,
        config: RayConfig,
        spec: ReplicaSpec,
        secrets: Mapping[str, str],
        failed: Callable[[FastDeployError], object] = lambda error: None,
    ):
        kind = ActorKind("replica", FastDeployReplica, config.replica_cpus)
        super().__init__(config, kind, config.replicas, spec, secrets, failed, config.keep_replicas)

    async def restart(self, name: str, why: str) -> None:
        """See Launcher. A replica that Ray is starting already is left alone."""
        actor = self._actors.get(name)
        if actor is None or name not in self._serving:
            return
        logger.warning("%s is restarted: %s", name, why)
        self._serving.remove(name)
        try:
            # Without an answer the actor's process is stuck. Ray kills a stuck process itself, after some seconds.
            await asyncio.wait_for(future_of(actor.kill.remote()), KILL_S)
        except self._ray.exceptions.RayActorError:
            return
        except TimeoutError:
            await asyncio.to_thread(self._ray.kill, actor, no_restart=False)

    async def add(self) -> str:
        """See Launcher. The new replica waits for a host that has room for it."""
        name = self._kind.name(max(map(self._kind.number, self._actors), default=-1) + 1)
        self._follow(name, await asyncio.to_thread(self._create, name))
        return name
