"""verl 0.9 integration: a rollout backend called "fastdeploy". Importing this module registers the backend.

    actor_rollout_ref.model.external_lib: fastdeploy.rl.frameworks.verl
    actor_rollout_ref.rollout.name: fastdeploy
    actor_rollout_ref.rollout.checkpoint_engine.backend: fastdeploy        (see verl_checkpoint_engine.py)
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module: fastdeploy.rl.frameworks.verl_checkpoint_engine
    actor_rollout_ref.rollout.engine_kwargs.fastdeploy.urls: [http://a:8180]    or
    actor_rollout_ref.rollout.engine_kwargs.fastdeploy.command: [fastdeploy]    each replica starts one, with ``args``
    actor_rollout_ref.rollout.engine_kwargs.fastdeploy.control_urls: [http://a:8181]    if control has its own port

Rollout replica i takes address i % len(urls): one for each, or the gateway of a fleet for all.

The servers' keys are FASTDEPLOY_API_KEY and FASTDEPLOY_CONTROL_KEY of the environment of verl's processes. A server
that a replica starts gets these keys. Such a server listens on its node's address, so it needs a control key.

The server is a process of its own, and may run in another Python environment: it needs Paddle, and verl needs torch.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from typing import Any

import numpy as np
import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.connection import repeat
from fastdeploy.rl.frameworks.verl_server import (
    CONTROL_S,
    Limits,
    VerlServer,
    address_of,
    peek_first,
    publish_step,
)
from fastdeploy.rl.state_transfer import NamedTensors

NAME = "fastdeploy"
# logprobs_mode: verl's names, which are vLLM's, and ours.
LOGPROBS_MODES = {None: "raw", "raw_logprobs": "raw", "processed_logprobs": "processed"}
START_S = 600.0
KEYS = {"api_key": "FASTDEPLOY_API_KEY", "control_key": "FASTDEPLOY_CONTROL_KEY"}
# Calls of one actor at once. verl sends all requests of an address to one actor. A call beyond the limit waits. If a
# pause holds the requests before it, the call that would resume them waits for ever.
MAX_CONCURRENCY = 100_000


def _options(config: Any) -> dict[str, Any]:
    return dict((config.engine_kwargs or {}).get(NAME, {}))


def _output(routed_experts: np.ndarray | None, **fields: Any) -> TokenOutput:
    """Return a reply. verl joins the routing of attempts as tensors."""
    return TokenOutput(routed_experts=None if routed_experts is None else torch.from_numpy(routed_experts), **fields)


def actor_name(replica_rank: int, suffix: str = "") -> str:
    return f"{NAME}_server_{replica_rank}_0{suffix}"


class FastDeployServer(VerlServer):
    """The Ray actor of a replica. url: of a server that runs; None = start one with ``command``. keys: named as in
    KEYS."""

    def __init__(
        self,
        limits: Limits,
        url: str | None,
        control_url: str | None,
        keys: dict[str, str],
        command: list[str],
        model: str,
    ):
        self._process: subprocess.Popen | None = None
        if url is None:
            address, port = ray.util.get_node_ip_address(), _free_port()
            url = f"http://{address}:{port}"
            serve = ["serve", "--model", model, "--host", address, "--port", str(port)]
            environment = os.environ | {KEYS[name]: key for name, key in keys.items() if key}
            self._process = subprocess.Popen([*command[:1], *serve, *command[1:]], env=environment)
        super().__init__(url, limits, _output, control_url=control_url, **keys)
        self._keys = keys

    async def start(self) -> str:
        """Wait until the server is healthy; return its address. Raises RuntimeError if the server process ended."""

        async def health() -> dict[str, Any]:
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}; its output says why")
            return await self._connection.call("GET", "/health", 5.0)

        await repeat(health, START_S)
        return self._connection.url

    def get_server_address(self) -> str:
        return self._connection.url

    def get_access(self) -> dict[str, Any]:
        """Return the arguments of a RolloutClient of this server."""
        return {"url": self._connection.url, "control_url": self._connection.control_url, **self._keys}

    async def stop(self) -> None:
        """Stop the server, if this actor has started it."""
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)


class FastDeployReplica(RolloutReplica):
    """One server for all workers of a replica. Several rollout replicas may share it; see Address."""

    async def launch_servers(self) -> None:
        options = _options(self.config)
        address = address_of(self.replica_rank, options)
        actor = ray.remote(FastDeployServer).options(
            name=actor_name(self.replica_rank, self.name_suffix), max_concurrency=MAX_CONCURRENCY, num_cpus=0
        )
        command = [*options.get("command", ["fastdeploy"]), *options.get("args", [])]
        model = str(omega_conf_to_dataclass(self.model_config, HFModelConfig).path)
        keys = {name: os.environ.get(variable, "") for name, variable in KEYS.items()}  # the actor may run elsewhere
        at, limits = (address.url, address.control_url), self._limits(address.is_first)
        handle = actor.remote(limits, *at, keys, command, model)
        self._server_address = (await handle.start.remote()).removeprefix("http://")
        self._server_handle = handle
        self.servers = [handle]

    def _limits(self, is_first: bool) -> Limits:
        config = self.config
        context = config.max_model_len or config.prompt_length + config.response_length
        frees = is_first and config.free_cache_engine
        return Limits(
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            max_model_len=context,
            ignore_eos=config.ignore_eos,
            # As in verl's own backends: only a standalone server does not sleep, only a colocated one keeps its KV.
            sleeps=frees and self.rollout_mode is not RolloutMode.STANDALONE,
            frees_kv=frees and self.rollout_mode is not RolloutMode.COLOCATED,
            seed=self.replica_rank + config.seed if config.full_determinism else None,
            logprobs_mode=LOGPROBS_MODES[config.logprobs_mode],
            routed_experts=config.enable_rollout_routing_replay,
        )

    def rollout_worker_use_gpu(self) -> bool:
        return False

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        return await self._server_handle.abort_request.remote(request_id)


class FastDeployAdapter(rollout_base.BaseRollout):
    """Lets verl's workers control the memory and weights of a server. Rank 0 of a replica acts for all its ranks."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any):
        super().__init__(config, model_config, device_mesh)
        rank, size = int(os.environ.get("RANK", 0)), self.config.tensor_model_parallel_size
        size *= self.config.data_parallel_size * self.config.pipeline_model_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._publishes = self.is_leader_rank and address_of(self.replica_rank, _options(self.config)).is_first
        self._handle: Any = None

    def _server(self) -> Any:
        self._handle = self._handle or ray.get_actor(actor_name(self.replica_rank))
        return self._handle

    async def resume(self, tags: list[str]) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server().wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server().sleep.remote()

    async def update_weights(
        self,
        weights: NamedTensors,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Publish full tensors to this replica's server as version ``global_steps``; None keeps the version. Does
        nothing without a tensor: the checkpoint engine has sent them. Of replicas that share an address only the first
        publishes. Every rank iterates ``weights`` to the end, since each item may be a collective."""
        if wire_format != "named_tensors":
            raise NotImplementedError(f"expected wire_format 'named_tensors', got {wire_format!r}")
        has_tensors, weights = await peek_first(weights)
        if not self._publishes:
            async for _pair in weights:
                pass
        elif has_tensors:
            access = await self._server().get_access.remote()
            async with RolloutClient(control_s=CONTROL_S, **access) as client:
                bucket_mb = self.config.checkpoint_engine.update_weights_bucket_megabytes
                await publish_step([client], weights, global_steps, chunk_mb=bucket_mb)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


RolloutReplicaRegistry.register(NAME, lambda: FastDeployReplica)
rollout_base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{FastDeployAdapter.__name__}"
