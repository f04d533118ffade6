"""SkyRL 0.4 integration: a policy worker that publishes its weights to our server or fleet. SkyRL is not changed.

    import ray
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
    from fastdeploy.rl.frameworks.skyrl import policy_worker

    class Trainer(RayPPOTrainer):      # or FullyAsyncRayPPOTrainer; returned by get_trainer of your BasePPOExp
        def build_models(self, PolicyWorker, CriticWorker, RefWorker):
            worker = ray.remote(num_gpus=1)(policy_worker(FSDPPolicyWorkerBase))
            super().build_models(worker, CriticWorker, RefWorker)

    generator.inference_engine.run_engines_locally=false
    generator.inference_engine.external_proxy_url=http://127.0.0.1:8180
    generator.inference_engine.external_server_urls=[http://127.0.0.1:8180]
    generator.inference_engine.served_model_name=NAME            (see /v1/models; or serve the policy's own path)
    trainer.placement.colocate_all=false

SkyRL itself pauses the server (mode keep) before a sync, and resumes it afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.connection import one_address
from fastdeploy.rl.publish import Publication
from fastdeploy.rl.uploads import MemoryVia


class FastDeployWeightSender:
    """The sender that publishes the policy's full weights to a server or a fleet. Replaces SkyRL's
    ``TrainerWeightTransferEngine`` with ``SkyrlTrainerCapabilities``, whose ``skyrl_`` attributes the worker reads.

    urls: SkyRL's ``external_server_urls``, a list of one address. source: yields (name, full tensor); iterated once per
    sync on every rank, since each item may be a collective. is_sender: True on rank 0. via, chunk_mb, deadline_s: see
    RolloutClient.publish. publications: the publications so far. The version of the
    n-th sync is str(n), from 1, like ``weight_version`` of SkyRL's client.
    """

    skyrl_handles_prefix_cache_reset = True
    skyrl_force_disable_expandable_segments = False
    skyrl_empty_cache_after_send = True
    skyrl_draft_source = None

    def __init__(
        self,
        urls: Sequence[str],
        source: Iterable[tuple[str, Any]],
        *,
        is_sender: bool = True,
        via: MemoryVia = "auto",
        chunk_mb: int = 256,
        deadline_s: float = 1800.0,
    ):
        self._url = one_address("external_server_urls", urls[0] if len(urls) == 1 else urls)
        self._source = source
        self._is_sender = is_sender
        self._options: dict[str, Any] = {"via": via, "chunk_mb": chunk_mb, "deadline_s": deadline_s}
        self._kv: Literal["keep", "recompute"] = "keep"
        self.publications: list[Publication] = []

    def skyrl_set_reset_prefix_cache(self, reset: bool) -> None:
        """Choose whether the KV of requests in flight is recomputed by the next weights. New requests never match
        prefix KV of older weights, with either setting."""
        self._kv = "recompute" if reset else "keep"

    def send_weights(self) -> None:
        """Publish the source as one commit. SkyRL calls this method in a thread without an event loop, with the rank's
        CUDA device. Raises the error of a server that refuses. The source is iterated to its end also after an error,
        since other ranks wait in its collectives."""
        pairs = iter(self._source)
        try:
            if self._is_sender:
                self.publications.append(asyncio.run(self._publish(pairs)))
        finally:
            for _pair in pairs:
                pass

    async def _publish(self, pairs: Iterable[tuple[str, Any]]) -> Publication:
        async with RolloutClient(self._url) as client:
            version = str(len(self.publications) + 1)
            return await client.publish(pairs, version, kv=self._kv, **self._options)

    def shutdown(self) -> None:
        """Do nothing: connections are closed after each sync."""


def policy_worker(base: Any) -> type:
    """Return a subclass of SkyRL's policy worker ``base`` (FSDPPolicyWorkerBase, MegatronPolicyWorkerBase) that sends
    its weights by FastDeployWeightSender."""

    class FastDeployPolicyWorker(base):
        async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
            """Make the sender. SkyRL calls this method on all ranks at once, before the first sync."""
            import torch
            from skyrl.train.utils.utils import str_to_torch_dtype

            self._weight_sync_inference_client = inference_engine_client
            dtype = str_to_torch_dtype(inference_engine_cfg.model_dtype)
            self._weight_sync_engine = FastDeployWeightSender(
                inference_engine_client.server_urls,
                self._build_weight_source(dtype, "nccl"),
                is_sender=torch.distributed.get_rank() == 0,
            )
            torch.distributed.barrier()

    return FastDeployPolicyWorker
