"""The command of a fleet on Ray whose gateways are actors, too: it makes the actors, shows where they serve, and ends
them. The gateways and replicas run on if this process is killed, and the next command of this fleet takes them over."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Mapping

import msgspec

from fastdeploy.core.errors import FastDeployError
from fastdeploy.entrypoints.child import REFUSED
from fastdeploy.entrypoints.gateway_config import GatewayConfig, RaySpec
from fastdeploy.entrypoints.process_tree import FAILED
from fastdeploy.entrypoints.ray_actors import ActorKind, RayActors
from fastdeploy.entrypoints.ray_gateway import FastDeployGateway, GatewaySpec
from fastdeploy.entrypoints.ray_launcher import RayLauncher

logger = logging.getLogger(__name__)
GATEWAY = ActorKind("gateway", FastDeployGateway, cpus=0.0)


def gateway_spec(config: GatewayConfig, spec: RaySpec) -> GatewaySpec:
    """Return the settings of gateways that make no replicas, and remove only those that they are asked to remove."""
    ray = msgspec.structs.replace(spec.ray, replicas=0, keep_replicas=True)
    serve = msgspec.structs.replace(config.serve, shutdown_s=ray.stop_s)
    launcher = RaySpec(ray, spec.replica)
    return GatewaySpec(msgspec.structs.replace(config, serve=serve, launcher=launcher))


class RayFleet:
    """The replicas and gateways of one fleet. number: of gateways. config: of all gateways. secrets,
    replica_secrets: variables of the environment of gateways and of replicas."""

    def __init__(
        self,
        spec: RaySpec,
        number: int,
        config: GatewayConfig,
        secrets: Mapping[str, str],
        replica_secrets: Mapping[str, str],
    ):
        self._number = number
        self._model = config.serve.model
        self._name = config.serve.served_model_name
        self._num_replicas = spec.ray.replicas
        self._replicas = RayLauncher(spec.ray, spec.replica, replica_secrets)
        keep = spec.ray.keep_replicas
        self._gateways = RayActors(spec.ray, GATEWAY, number, gateway_spec(config, spec), secrets, keep=keep)

    def run(self) -> int:
        """Block until a stop signal, and return the exit status: 0, or REFUSED if nothing can be served."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        try:
            for actors in (self._replicas, self._gateways):  # not both at once: ray.init is not made for two threads
                await actors.open()
        except FastDeployError as refusal:
            return self._refused(refusal)
        work = [self._follow(self._replicas, lambda urls: None), self._follow(self._gateways, self._show)]
        tasks = [asyncio.create_task(one) for one in (*work, _wait(stopped))]
        done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        errors = [error for task in done if (error := task.exception()) is not None]
        for error in errors:
            if isinstance(error, FastDeployError):
                self._refused(error)
            else:
                logger.error("following the actors failed", exc_info=error)
        await self._gateways.remove_all()
        await self._gateways.unfollow()
        await self._replicas.close()
        if not errors:
            return 0
        return REFUSED if all(isinstance(error, FastDeployError) for error in errors) else FAILED

    def _refused(self, error: FastDeployError) -> int:
        print(f"fastdeploy: cannot serve {self._model}: {error.message}", file=sys.stderr, flush=True)
        return REFUSED

    async def _follow(self, actors: RayActors, show: Callable[[list[str]], None]) -> None:
        async for placements in actors.placements():
            show([placement.url for placement in placements])

    def _show(self, urls: list[str]) -> None:
        """Tell the user where the gateways serve, once all of them do, and after each change of an address."""
        if len(urls) == self._number:
            what = f"fleet of {self._num_replicas} serves {self._name}"
            print(f"FastDeploy {what} at {', '.join(sorted(urls))}", flush=True)


async def _wait(stopped: asyncio.Event) -> None:
    await stopped.wait()
