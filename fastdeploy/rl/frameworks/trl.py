"""TRL integrations that need neither NCCL, nor the package vllm, nor a change of TRL.

    trainer = AsyncGRPOTrainer(..., weight_transfer=FastDeployWeightTransfer("http://127.0.0.1:8180"))
    trainer = FastDeployGeneration("http://127.0.0.1:8180").attach(GRPOTrainer(...))

TRL 1.16 calls pause, send_weights, resume around each step of AsyncGRPOTrainer (trl/experimental/async_grpo,
WeightTransferProtocol), and sync_weights and generate in GRPOTrainer (trl/generation, VLLMGeneration).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

from fastdeploy.rl.holds import note_cleanup_failure
from fastdeploy.rl.publish import Publication
from fastdeploy.rl.sync_client import SyncRolloutClient
from fastdeploy.rl.uploads import MemoryVia

Trainer = TypeVar("Trainer")
# Fields of GRPOConfig and GRPOTrainer that are sampling parameters of the same name here.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class FastDeployWeightTransfer:
    """The ``weight_transfer`` that publishes the trainer's weights to a server or a fleet, which is sent what changed
    since the last sync if it serves that one.

    label: the version of the n-th sync is label + str(n), from 0 (the weights at the start of training). kv: the KV of
    requests in flight is kept, or recomputed by the new weights, as TRL assumes. paused False: do not pause, and commit
    between two steps. delta, via, chunk_mb, deadline_s: see RolloutClient.publish. client: further options of
    RolloutClient (api_key, control_key, control_url, hold_ttl_s). publications: the publications so far.

    A failed sync raises, and the server keeps its weights.
    """

    def __init__(
        self,
        url: str,
        *,
        label: str = "trl-",
        kv: Literal["keep", "recompute"] = "recompute",
        paused: bool = True,
        delta: Literal["auto", "never"] = "auto",
        via: MemoryVia = "auto",
        chunk_mb: int = 256,
        deadline_s: float = 1800.0,
        **client: Any,
    ):
        self._url = url
        self._client_options = client
        self._label = label
        self._kv: Literal["keep", "recompute"] = kv
        self._paused = paused
        self._publish_options: dict[str, Any] = {
            "delta": delta,
            "via": via,
            "chunk_mb": chunk_mb,
            "deadline_s": deadline_s,
        }
        self._hold: str | None = None
        self._client: SyncRolloutClient | None = None
        self.publications: list[Publication] = []

    def init_weight_transfer(self) -> None:
        """Connect. Called once, before the first sync."""
        self._client = SyncRolloutClient(self._url, **self._client_options)

    def pause(self) -> None:
        """Freeze the requests in flight."""
        if self._paused:
            self._hold = f"trl-{uuid.uuid4().hex}"
            self._connected().pause("keep", hold_id=self._hold)

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Publish all ``(name, tensor)`` pairs as one commit. Of tied weights, ``iterator`` has the first name only, as
        the servers expect. After a failure, the server is resumed before the error is raised."""
        try:
            version = f"{self._label}{len(self.publications)}"
            publish = self._connected().publish
            self.publications.append(publish(dict(iterator), version, kv=self._kv, **self._publish_options))
        except BaseException as error:
            with note_cleanup_failure(error):
                self.resume()
            raise

    def resume(self) -> None:
        """Release only the hold of :meth:`pause`. A second call does nothing. Raises HoldLost if the hold had ended
        early."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._connected().resume(hold)

    def destroy(self) -> None:
        """Resume the server and close the connections."""
        if self._client is not None:
            self.resume()
            self._client.close()
            self._client = None

    def _connected(self) -> SyncRolloutClient:
        if self._client is None:
            self.init_weight_transfer()
        assert self._client is not None
        return self._client


class FastDeployGeneration:
    """The ``vllm_generation`` of GRPOTrainer and of the trainers that are made of it: a server or a fleet samples the
    completions, and gets the trainer's weights before the first completion of each step.

    label: as for FastDeployWeightTransfer. timeout_s: limit of one batch of completions. client: further options of
    RolloutClient. publications: the publications so far, in the main process.

    Each process of the trainer asks for its own completions, with log probabilities of the distribution that was
    sampled from (``processed``), which TRL's importance sampling correction expects. A completion that the server
    aborts is continued. The model must be a whole one: the names of PEFT's tensors are not those of the server.
    """

    def __init__(self, url: str, *, label: str = "trl-", timeout_s: float = 1800.0, **client: Any):
        self._client = SyncRolloutClient(url, **client)
        self._label, self._timeout_s = label, timeout_s
        self._trainer: Any = None
        self.publications: list[Publication] = []

    def attach(self, trainer: Trainer) -> Trainer:
        """Let ``trainer``, which was made with use_vllm=False, sample here. Raises ValueError for a PEFT model."""
        given: Any = trainer
        if hasattr(given.accelerator.unwrap_model(given.model), "merge_adapter"):
            raise ValueError(
                "expected a whole model; AsyncGRPOTrainer sends adapters without any class of this project"
            )
        self._trainer = given
        given.use_vllm, given.vllm_mode, given.vllm_generation, given._last_loaded_step = True, "server", self, -1
        return trainer

    def sync_weights(self) -> None:
        """Publish the trainer's weights. All processes call this, since each may hold a part of them."""
        accelerator, model = self._trainer.accelerator, self._trainer.model_wrapped
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            names = [name for name, _ in accelerator.unwrap_model(model).named_parameters()]  # tied weights once
            version = f"{self._label}{len(self.publications)}"
            self.publications.append(self._client.publish({name: state[name] for name in names}, version))
        accelerator.wait_for_everyone()

    def generate(
        self, prompts: Sequence[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """Return the prompts, a completion of each, and its log probabilities, each in a list of its own. ``prompts``
        has each prompt ``num_generations`` times."""
        if images is not None and any(images):
            raise ValueError("expected no images: this server's models read text")
        with profiler or nullcontext():
            rollouts = self._client.generate_many(prompts, self._params(), timeout_s=self._timeout_s)
        logprobs = [[[logprob] for logprob in rollout.logprobs or ()] for rollout in rollouts]
        return list(prompts), [rollout.token_ids for rollout in rollouts], logprobs, None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _params(self) -> dict[str, Any]:
        trainer, args = self._trainer, self._trainer.args
        params = {name: getattr(trainer, name) for name in SAMPLING}
        params |= {"max_tokens": trainer.max_completion_length, "logprobs_mode": "processed"}
        if args.vllm_structured_outputs_regex is not None:
            params["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
        return params | (args.generation_kwargs or {})
